"""Chooses what holds a process to its limits: control groups of version 2 or 1 where they can be had, sampling otherwise.

What is weaker is said in `notes`; nothing is weakened silently, and `require` refuses it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

from host.emulator import cgroups
from host.emulator.cgroups import Counters
from host.emulator.observe import tree


class EnforcementError(ValueError):
    """The kernel's limits were required and cannot be had."""


class Group(Protocol):
    """A group of processes with limits."""

    controllers: tuple[str, ...]
    missing: dict[str, str]

    @property
    def version(self) -> str:
        """Its name in the summary."""

    def entrances(self) -> list[Path]:
        """Files that a process writes its id into to join."""

    def adopt(self, pid: int) -> None:
        """Called once the process runs."""

    def pids(self) -> list[int]:
        """Processes in the group."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Limits all memory, page cache included; no swap."""

    def limit_cpu(self, cores: float | None) -> None:
        """Limits CPU time to that many cores' worth."""

    def limit_flash(self, device: str, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> None:
        """Limits the bandwidth of a block device."""

    def counters(self) -> Counters:
        """What the kernel counted."""

    def remove(self) -> None:
        """Ends what is left and removes the group."""


class Sampling:
    """No group: the emulator watches the process tree and ends it when it holds too much."""

    version = "sampling"

    def __init__(self, missing: str) -> None:
        """`missing` says why there is no group."""
        self.controllers: tuple[str, ...] = ()
        self.missing = dict.fromkeys(("memory", "cpu", "io"), missing)
        self._pid = 0

    def entrances(self) -> list[Path]:
        """None."""
        return []

    def adopt(self, pid: int) -> None:
        """Takes the root of the tree."""
        self._pid = pid

    def pids(self) -> list[int]:
        """The tree."""
        return tree(self._pid) if self._pid else []

    def limit_memory(self, limit_bytes: int) -> None:
        """Nothing holds it; the emulator's gate does."""

    def limit_cpu(self, cores: float | None) -> None:
        """Not limited, see `notes`."""

    def limit_flash(self, device: str, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> None:
        """Not limited here; the throttled reader is."""

    def counters(self) -> Counters:
        """The kernel counts nothing for a process that is in no group of its own."""
        return Counters(None, 0, None, None)

    def remove(self) -> None:
        """Nothing was made."""


def choose_group(*, require: bool = False, mount: Path = cgroups.MOUNT) -> Group:
    """Version 2 if its memory controller is mounted, else version 1, else sampling.

    Args:
        require: Refuse sampling.
        mount: Where control groups are mounted.

    Raises:
        EnforcementError: Neither version can be had, and `require` is set.
    """
    unified = mount / "cgroup.controllers"
    if unified.is_file() and "memory" in unified.read_text().split():
        group, why = _version2(mount)
    else:
        group, why = _version1(mount)
    if group is not None:
        return group
    if require:
        raise EnforcementError(
            f"--require-enforcement: the kernel's limits cannot be had ({why}). Run as root, or in a delegated group: "
            "`systemd-run --user --scope -p Delegate=yes pocketdit emulate ...`; or leave the flag out to be measured by "
            "sampling alone."
        )
    return Sampling(why)


def _version1(mount: Path) -> tuple[Group | None, str]:
    if not (mount / "memory" / "cgroup.procs").exists():
        return None, f"no memory controller under {mount}"
    try:
        return cgroups.CgroupV1(mount), ""
    except OSError as error:
        return None, f"cgroup v1: {cgroups.reason(error)}"


def _version2(mount: Path) -> tuple[Group | None, str]:
    failures = []
    for parent in cgroups.delegated_parents(mount):
        try:
            return cgroups.CgroupV2(parent), ""
        except OSError as error:
            failures.append(f"{parent}: {cgroups.reason(error)}")
    if os.geteuid() and systemd_answers():
        return cgroups.CgroupV2Scope(mount), ""
    return (
        None,
        f"cgroup v2: {'; '.join(failures) or 'no group is delegated to this user and no systemd of the user runs'}",
    )


def systemd_answers() -> bool:
    """Whether systemd makes scopes for this user: it is there, runs, and gives memory away."""
    if shutil.which("systemd-run") is None:
        return False
    command = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--property=Delegate=yes", "--", "true"]
    return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0


def block_device(path: Path, sysfs: Path = Path("/sys/dev/block")) -> str | None:
    """The whole disk that `path` lies on as `major:minor`; None for file systems without one (tmpfs, overlay, btrfs)."""
    number = path.stat().st_dev
    entry = sysfs / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return None
    folder = entry.resolve()
    return ((folder.parent if (folder / "partition").exists() else folder) / "dev").read_text().strip()


def cores_text(cores: float) -> str:
    """A share of cores for a sentence."""
    return f"{cores:.2g} core{'' if cores == 1 else 's'}"
