"""Reads processes from outside: memory and flash traffic of a process tree, and what of the page cache belongs to a bundle.

Linux's `/proc`; needs no privilege for one's own processes. Writes nothing, drops page cache.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.memory import read_fields

PROC = Path("/proc")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process tree."""

    private_bytes: int
    """Anonymous, shared-anonymous and dirty pages, swapped ones too: what only the end of the process gives back."""
    file_bytes: int
    """Resident clean pages of files; the system drops them when it wants."""
    locked_bytes: int
    swap_bytes: int


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in (PROC / str(pid) / "task").iterdir():
                queue += map(int, (task / "children").read_text().split())
    return found


def memory_of(pids: Iterable[int]) -> Memory:
    """Sums processes; pages they share are counted once. One that has ended counts nothing."""
    private = file_backed = locked = swap = 0
    for pid in pids:
        try:
            values = read_fields(PROC / str(pid) / "smaps_rollup", unit=1024)
        except OSError:
            continue
        swapped = values.get("SwapPss", 0)
        anonymous = values["Pss_Anon"] + values["Pss_Shmem"]
        dirty_files = max(0, values.get("Pss_Dirty", 0) - anonymous)
        private += anonymous + dirty_files + swapped
        file_backed += max(0, values["Rss"] - anonymous - dirty_files)
        locked += values["Locked"]
        swap += swapped
    return Memory(private, file_backed, locked, swap)


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of one process, a hundred times cheaper than `memory_of`; 0 once it has ended."""
    try:
        _, resident, shared, *_ = (PROC / str(pid) / "statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def flash_bytes(pid: int) -> tuple[int, int]:
    """Bytes a process had read from and written to storage so far; zeros once it has ended."""
    try:
        fields = read_fields(PROC / str(pid) / "io")
    except OSError:
        return 0, 0
    return fields["read_bytes"], fields["write_bytes"]


def alive(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is there and not yet dead."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def cached_bytes(paths: Sequence[Path]) -> int:
    """How much of these files is in the page cache; of files one may not write, the kernel says all."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in paths:
        if not (size := path.stat().st_size):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            view = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), view)
            del anchor
            if not failed:
                total += sum(byte & 1 for byte in bytes(view)) * mmap.PAGESIZE
    return total


def drop_page_cache(paths: Sequence[Path]) -> bool:
    """Puts files out of the page cache, so that they are really read from flash; says whether that worked.

    Asks for these files alone, which needs no privilege. Pages that stay because others hold them go only with the whole
    system's cache, and that only root may drop.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    allowed = 0.01 * sum(path.stat().st_size for path in paths)
    if cached_bytes(paths) > allowed and os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1")
    return cached_bytes(paths) <= allowed
