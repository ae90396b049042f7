"""Measures this process: private and file-backed memory, and bytes read from storage. Linux and Android.

Private is what the low-memory killer can get back only by killing: anonymous and shared-anonymous pages, in memory or
swapped. Mapped weights are file-backed and clean; the system drops them when it wants.
"""

import threading
from pathlib import Path

SMAPS = Path("/proc/self/smaps_rollup")
IO = Path("/proc/self/io")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
MIB = 1024 * 1024
SAMPLE_INTERVAL_S = 0.02


def memory_bytes() -> tuple[int, int]:
    """Private bytes and file-backed resident bytes of this process now."""
    values = read_fields(SMAPS, unit=1024)
    private = values["Anonymous"] + values.get("Pss_Shmem", 0) + values.get("Swap", 0)
    return private, max(0, values["Rss"] - private)


def storage_read_bytes() -> int:
    """Bytes this process made the kernel read from storage; what came from the page cache is not counted."""
    return read_fields(IO)["read_bytes"]


def available_bytes() -> int:
    """Memory the page cache can have: what the system has free, or what this process's memory cgroup leaves if that is less."""
    free = [read_fields(MEMINFO, unit=1024)["MemAvailable"]]
    for line in CGROUP.read_text().splitlines() if CGROUP.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = CGROUP_MOUNT / ("memory" if controllers else "") / path.lstrip("/")
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()) != "max":
                cached = read_fields(folder / "memory.stat").get("inactive_file", 0)
                free.append(int(text) - int((folder / usage).read_text()) + cached)
    return max(0, min(free))


class MemoryWatch:
    """Samples memory on a thread, so that a peak inside a step is seen.

    Attributes:
        idle_private_bytes: Private memory when the watch was made: the interpreter and its libraries.
        peak_private_bytes: Highest private memory beyond idle so far.
    """

    def __init__(self) -> None:
        """Takes the idle figure; make it after the imports and before the bundle is opened."""
        self.idle_private_bytes = memory_bytes()[0]
        self.peak_private_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> tuple[int, int]:
        """Private bytes beyond idle, and file-backed bytes; updates the peak."""
        private, file_backed = memory_bytes()
        private = max(0, private - self.idle_private_bytes)
        self.peak_private_bytes = max(self.peak_private_bytes, private)
        return private, file_backed

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self.read()


def read_fields(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Lines `name: value` or `name value` of a file of the kernel's, as bytes where `unit` says so; others are left out."""
    lines = (line.replace(":", " ", 1).split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) * unit for words in lines if len(words) > 1 and words[1].isdigit()}
