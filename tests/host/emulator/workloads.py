"""Small workloads for the emulator's own tests, chosen by an environment variable; they need no library and start at once."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1024**2
CHOICE = "POCKETDIT_TEST_WORKLOAD"


def hold(job: Any) -> None:
    """Holds 40 MiB for a while."""
    job.at("forward", 3, 7)
    block = b"x" * (40 * MIB)
    time.sleep(0.3)
    del block


def flash_past(job: Any) -> None:
    """Holds 40 MiB for a few milliseconds only."""
    job.at("backward", 1, 2)
    for _ in range(5):
        time.sleep(0.033)
        block = b"x" * (40 * MIB)
        time.sleep(0.004)
        del block


def hold_in_a_child(job: Any) -> None:
    """A child of the process holds 40 MiB."""
    job.at("load", 0, None)
    code = f"import time; block = b'x' * ({40 * MIB}); time.sleep(0.5)"
    subprocess.run([sys.executable, "-c", code], check=True)


def share(job: Any) -> None:
    """Holds 24 MiB of shared anonymous memory and has as much locked."""
    shared = mmap.mmap(-1, 24 * MIB)
    shared.write(b"x" * (24 * MIB))
    locked = ctypes.create_string_buffer(24 * MIB)
    ctypes.CDLL(None).mlock(locked, ctypes.c_size_t(24 * MIB))
    time.sleep(0.3)


def read_files(job: Any) -> None:
    """Maps and reads 48 MiB of a file: not private."""
    path = Path(job.spec["run_dir"]) / "file"
    with path.open("wb") as file:
        for _ in range(48):
            file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        time.sleep(0.3)


def write_files(job: Any) -> None:
    """Maps 24 MiB of a file and writes all of it."""
    with (Path(job.spec["run_dir"]) / "file").open("w+b") as file:
        file.truncate(24 * MIB)
        with mmap.mmap(file.fileno(), 0) as mapped:
            for start in range(0, 24 * MIB, mmap.PAGESIZE):
                mapped[start] = 1
            time.sleep(0.1)


def killed_in_a_checkpoint(job: Any) -> None:
    """Writes 16 MiB of a log, 8 of an adapter, then ends in the middle of a checkpoint, 24 MiB into it."""
    with (Path(job.spec["run_dir"]) / "file").open("wb", buffering=0) as file:
        for phase, size in (("optimizer", 16), ("adapter", 8), ("checkpoint", 24)):
            job.at(phase, 1, None)
            file.write(bytes(size * MIB))
    os.kill(os.getpid(), signal.SIGKILL)


def burst(job: Any) -> None:
    """Takes a gigabyte at once, from C, without a pause in which a sampler could act."""
    job.at("checkpoint", 2, None)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.memset(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(1024 * MIB))), 1, ctypes.c_size_t(1024 * MIB))


def crash(job: Any) -> None:
    """Ends in the middle."""
    job.at("optimizer", 5, None)
    print("the last words", file=sys.stderr, flush=True)
    os._exit(7)


def run(job: Any) -> dict[str, Any]:
    """Runs the chosen one."""
    globals()[os.environ[CHOICE]](job)
    return {"status": "complete"}
