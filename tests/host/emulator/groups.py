"""Control groups that an emulator should have removed."""

import os
from pathlib import Path

from host.emulator.cgroups import MOUNT, PREFIX


def groups_left() -> list[Path]:
    """Groups of this process, or of one that is gone; those of tests that run beside this one are theirs."""
    owners = {path: path.name.removeprefix(PREFIX).partition("-")[0] for path in MOUNT.glob(f"**/{PREFIX}*")}
    return [path for path, pid in owners.items() if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists()]
