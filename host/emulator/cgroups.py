"""The kernel's limits: control groups of version 1 and 2 for memory, CPU and the flash device.

Makes groups called `pocketdit-emulate-<pid>`, removes them afterwards, and those that a killed emulator left behind.
Both versions count what a process touches after it joined, so it joins before it is anything: between fork and exec.
"""

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from host.emulator.observe import alive
from runtime.memory import MIB, read_fields

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "pocketdit-emulate-"
PERIOD_US = 100_000
UNLIMITED = 2**63 - 4096
"""What version 1 shows of a group without a limit."""
SCOPE_TIMEOUT_S = 20.0
HIGH_SHARE = 1 / 32
"""Of the limit: so far below it version 2 starts to reclaim and to slow the process down, as Android 17 does."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel counted."""

    anon_bytes: int | None
    """Anonymous and shared-anonymous memory of the group."""
    oom_kills: int
    limit_hits: int | None
    throttled_seconds: float | None


class LimitRefusedError(OSError):
    """The kernel refuses a memory limit, because more than that is in use and cannot be reclaimed."""


class CgroupV1:
    """One folder in each controller's hierarchy.

    Attributes:
        version: For the summary.
        controllers: Those that could be used: memory always, cpu and blkio where there are any.
        missing: Why another could not, by controller.
    """

    version = "cgroup v1"

    def __init__(self, mount: Path = MOUNT, name: str = "") -> None:
        """Makes the folders.

        Raises:
            OSError: The memory controller is not there or not ours to use.
        """
        self._dirs: dict[str, Path] = {}
        self.missing: dict[str, str] = {}
        for controller in ("memory", "cpu", "blkio"):
            root = mount / controller
            remove_stale(root)
            try:
                self._dirs[controller] = make_group(root, name)
            except OSError as error:
                if controller == "memory":
                    self.remove()
                    raise
                self.missing[controller] = reason(error)
        self.controllers = tuple(self._dirs)
        with contextlib.suppress(OSError):
            (self._dirs["memory"] / "memory.swappiness").write_text("0")

    def entrances(self) -> list[Path]:
        """Files that a process writes its id into to join."""
        return [folder / "cgroup.procs" for folder in self._dirs.values()]

    def adopt(self, pid: int) -> None:
        """Nothing to do: processes join by themselves."""

    def pids(self) -> list[int]:
        """Processes in the group."""
        return read_pids(self._dirs["memory"])

    def limit_memory(self, limit_bytes: int) -> None:
        """Limits all memory of the group, page cache included, without swap.

        Raises:
            LimitRefusedError: More is in use.
        """
        limit_bytes = min(limit_bytes, own_limit_bytes(self._dirs["memory"].parent))
        swap = self._dirs["memory"] / "memory.memsw.limit_in_bytes"  # not there if the kernel does not account for swap
        if swap.exists():
            swap.write_text("-1")  # never below the limit without swap
        try:
            (self._dirs["memory"] / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise LimitRefusedError(errno.EBUSY, f"more than {limit_bytes} bytes are in use") from None
        if swap.exists():
            # Where both are equal, the kernel counts no hits of either; swappiness 0 keeps the rest from being swap.
            swap.write_text(str(min(UNLIMITED, limit_bytes + MIB)))

    def limit_cpu(self, cores: float | None) -> None:
        """Limits CPU time to that many cores' worth; None lifts the limit."""
        quota = -1 if cores is None else max(1000, round(cores * PERIOD_US))
        (self._dirs["cpu"] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._dirs["cpu"] / "cpu.cfs_quota_us").write_text(str(quota))

    def limit_flash(self, device: str, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> None:
        """Limits the bandwidth of a block device, `major:minor`; None lifts the limit."""
        for way, rate in (("read", read_bytes_per_s), ("write", write_bytes_per_s)):
            file = self._dirs["blkio"] / f"blkio.throttle.{way}_bps_device"
            file.write_text(f"{device} {round(rate or 0)}")

    def counters(self) -> Counters:
        """What the kernel counted so far."""
        memory, cpu = self._dirs["memory"], self._dirs.get("cpu")
        stat = read_fields(memory / "memory.stat")
        kills = read_fields(memory / "memory.oom_control").get("oom_kill", 0)
        hits = int((memory / "memory.failcnt").read_text())
        throttled = None if cpu is None else read_fields(cpu / "cpu.stat").get("throttled_time", 0) / 1e9
        return Counters(stat["total_rss"] + stat.get("total_shmem", 0), kills, hits, throttled)

    def remove(self) -> None:
        """Ends what is still in the groups and removes them."""
        for folder in self._dirs.values():
            remove_group(folder)


class CgroupV2:
    """One folder in the single hierarchy.

    Attributes:
        version: For the summary.
        controllers: Of memory, cpu and io those that the folder has.
        missing: Why another could not, by controller.
    """

    version = "cgroup v2"

    def __init__(self, parent: Path, name: str = "") -> None:
        """Makes a group in `parent`, which has to be delegated to this user.

        Raises:
            OSError: It is not, or its memory controller cannot be enabled: it has processes of its own, say.
        """
        remove_stale(parent)
        self.missing: dict[str, str] = {}
        available = (parent / "cgroup.controllers").read_text().split()
        for controller in ("memory", "cpu", "io"):
            if controller in (parent / "cgroup.subtree_control").read_text().split():
                continue
            try:
                if controller not in available:
                    raise OSError(errno.ENOENT, "not delegated to this group")
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                if controller == "memory":
                    raise
                self.missing[controller] = reason(error)
        self._set(make_group(parent, name))

    def _set(self, folder: Path) -> None:
        self._dir = folder
        names = (("memory", "memory.max"), ("cpu", "cpu.max"), ("io", "io.max"))
        self.controllers = tuple(controller for controller, file in names if (folder / file).exists())

    def entrances(self) -> list[Path]:
        """Files that a process writes its id into to join."""
        return [self._dir / "cgroup.procs"]

    def adopt(self, pid: int) -> None:
        """Nothing to do: processes join by themselves."""

    def pids(self) -> list[int]:
        """Processes in the group."""
        return read_pids(self._dir)

    def limit_memory(self, limit_bytes: int) -> None:
        """Limits all memory of the group, page cache included, without swap; reclaim begins a little below.

        Version 2 never refuses a limit: it reclaims what it can and kills if that is not enough.
        """
        with contextlib.suppress(FileNotFoundError):  # not there if the kernel does not account for swap
            (self._dir / "memory.swap.max").write_text("0")
        (self._dir / "memory.high").write_text(str(round(limit_bytes * (1 - HIGH_SHARE))))
        (self._dir / "memory.max").write_text(str(limit_bytes))

    def limit_cpu(self, cores: float | None) -> None:
        """Limits CPU time to that many cores' worth; None lifts the limit."""
        quota = "max" if cores is None else str(max(1000, round(cores * PERIOD_US)))
        (self._dir / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def limit_flash(self, device: str, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> None:
        """Limits the bandwidth of a block device, `major:minor`; None lifts the limit."""
        read, write = ("max" if rate is None else str(round(rate)) for rate in (read_bytes_per_s, write_bytes_per_s))
        (self._dir / "io.max").write_text(f"{device} rbps={read} wbps={write}")

    def counters(self) -> Counters:
        """What the kernel counted so far."""
        stat, events = read_fields(self._dir / "memory.stat"), read_fields(self._dir / "memory.events")
        throttled = read_fields(self._dir / "cpu.stat").get("throttled_usec") if "cpu" in self.controllers else None
        return Counters(
            stat["anon"] + stat.get("shmem", 0),
            events.get("oom_kill", 0),
            events.get("max"),
            None if throttled is None else throttled / 1e6,
        )

    def remove(self) -> None:
        """Ends what is still in the group and removes it."""
        remove_group(self._dir)


class CgroupV2Scope(CgroupV2):
    """A scope that systemd makes for an ordinary user: the process is started in it, the limits are set once it is there."""

    def __init__(self, mount: Path = MOUNT, proc: Path = Path("/proc"), name: str = "") -> None:
        """Makes nothing yet.

        Args:
            mount: Where version 2 is mounted.
            proc: Where processes are listed.
            name: Of the scope.
        """
        self._mount, self._proc, self._name = mount, proc, name or f"{PREFIX}{os.getpid()}"
        self._count = 0
        self._counted = Counters(None, 0, None, None)
        self._dir = mount / "none"
        self.missing = {"io": "a scope of systemd's is not asked for it"}
        self.controllers = ("memory",)

    def command(self) -> list[str]:
        """What stands before the command that is to run in the scope."""
        self._count += 1  # a scope ends with its processes, the next run gets another
        properties = [f"--property={name}" for name in ("Delegate=yes", "MemorySwapMax=0", "OOMPolicy=continue")]
        unit = f"--unit={self._name}-{self._count}"
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", unit, *properties, "--"]

    def entrances(self) -> list[Path]:
        """None: systemd puts the process there."""
        return []

    def adopt(self, pid: int) -> None:
        """Waits until `systemd-run` has moved the process into its scope, which takes systemd some milliseconds.

        Raises:
            OSError: It ends without, or it is not moved in time, or the scope's memory limit is not ours to set.
        """
        end = time.monotonic() + SCOPE_TIMEOUT_S
        while self._name not in (path := group_path(pid, proc=self._proc)):
            if time.monotonic() > end or not alive(pid, self._proc):
                break
            time.sleep(0.005)
        folder = self._mount / path.lstrip("/")
        if self._name not in path or not os.access(folder / "memory.max", os.W_OK):
            raise OSError(
                f"systemd-run: process {pid} is in {path or 'no group'}, expected a scope {self._name}-{self._count} with a "
                "memory limit of this user's. See `journalctl --user`, or run as root."
            )
        self._set(folder)
        self.missing = {
            controller: "systemd does not delegate it to users here"
            for controller in ("cpu", "io")
            if controller not in self.controllers
        }

    def limit_memory(self, limit_bytes: int) -> None:
        """As in any group, once the process is there."""
        if self._dir.is_dir():
            super().limit_memory(limit_bytes)

    def limit_cpu(self, cores: float | None) -> None:
        """As in any group, once the process is there."""
        if self._dir.is_dir():
            super().limit_cpu(cores)

    def counters(self) -> Counters:
        """What the kernel counted by the last look: systemd removes the scope as soon as it is empty."""
        with contextlib.suppress(OSError, KeyError):
            self._counted = super().counters()
        return self._counted

    def remove(self) -> None:
        """Ends what is still in the scope; systemd removes it."""
        with contextlib.suppress(OSError):
            (self._dir / "cgroup.kill").write_text("1")


def make_group(parent: Path, name: str = "") -> Path:
    """A new group in `parent`; the name has this process's id, so that `remove_stale` knows when it is nobody's."""
    if not (parent / "cgroup.procs").exists():
        raise FileNotFoundError(errno.ENOENT, "no such controller here", str(parent))
    folder = parent / (name or f"{PREFIX}{os.getpid()}")
    folder.mkdir(exist_ok=True)
    return folder


def remove_group(folder: Path, patience_s: float = 5.0) -> None:
    """Ends the processes in a group and removes it; the kernel takes a moment to let go of ended ones."""
    end = time.monotonic() + patience_s
    while folder.exists():
        for pid in read_pids(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        if time.monotonic() > end:
            raise RuntimeError(
                f"{folder} could not be removed: it still has processes {read_pids(folder)}. Remove it by hand."
            )
        time.sleep(0.02)


def remove_stale(parent: Path) -> None:
    """Removes groups whose emulator is gone: it was killed before it could clean up."""
    for folder in parent.glob(f"{PREFIX}*") if parent.is_dir() else ():
        owner = re.fullmatch(rf"{PREFIX}(\d+)(-.*)?", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(OSError, RuntimeError):
                remove_group(folder)


def own_limit_bytes(root: Path) -> int:
    """The limit this process already lives under; a group beside its own must not be a way out of it."""
    stat = root / group_path("self", "memory").lstrip("/") / "memory.stat"
    return read_fields(stat).get("hierarchical_memory_limit", UNLIMITED) if stat.is_file() else UNLIMITED


def delegated_parents(mount: Path = MOUNT) -> Iterator[Path]:
    """Groups of version 2 in which this process may make one of its own: around its own group, nearest first, then the root."""
    folder = mount / group_path("self").lstrip("/")
    while folder.is_relative_to(mount):
        files = (folder / "cgroup.procs", folder / "cgroup.subtree_control")
        if all(os.access(file, os.W_OK) for file in files) and os.access(folder, os.W_OK):
            yield folder
        if folder == mount:
            return
        folder = folder.parent


def group_path(pid: int | str, controller: str = "", proc: Path = Path("/proc")) -> str:
    """Where a process is below the mount of a controller of version 1, or of version 2; empty if it is in none."""
    lines = (line.split(":", 2) for line in (proc / str(pid) / "cgroup").read_text().splitlines())
    return next((path for _, controllers, path in lines if controller in controllers.split(",")), "")


def read_pids(folder: Path) -> list[int]:
    """Processes of a group; none if it is not there."""
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def reason(error: OSError) -> str:
    """An error of the system for a sentence."""
    return (error.strerror or str(error)).lower()
