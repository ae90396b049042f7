"""A phone's flash seen from inside the process: slow where the kernel cannot slow it down, failing and full on request.

Wraps the few functions through which the runtime reads and writes; what it does is otherwise the runtime's own.
"""

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import runtime.atomic
import runtime.bundle
import runtime.tensor_file
from host.emulator.observe import cached_bytes
from runtime.sample_store import Sample, SampleStore
from runtime.tensor_file import TensorFile
from runtime.weight_stream import WeightStream


class Storage:
    """Switches over the runtime's storage.

    Attributes:
        read_bytes_per_s: Of the throttled reader; may change at any time.
    """

    def __init__(self) -> None:
        """Changes nothing yet."""
        self.read_bytes_per_s = float("inf")
        self._one_at_a_time = threading.Lock()

    def throttle(self, *, read_bytes_per_s: float, write_bytes_per_s: float, latency_us: float) -> None:
        """Has reads and writes take as long as they would on that flash, by waiting: blocks and samples that are not in the
        page cache, the check of hashes, and what is synced."""
        self.read_bytes_per_s = read_bytes_per_s
        latency_s = latency_us / 1e6
        will_need, acquire, read = TensorFile.will_need, WeightStream.acquire, SampleStore.read
        sync, digest = runtime.atomic.fsync, runtime.bundle.sha256_file

        @contextmanager
        def paced(size_bytes: float) -> Iterator[None]:
            with self._one_at_a_time:
                start = time.perf_counter()
                yield
                due = size_bytes / self.read_bytes_per_s + latency_s if size_bytes else 0.0
                time.sleep(max(0.0, due - (time.perf_counter() - start)))

        def paced_will_need(file: TensorFile) -> None:
            with paced(file.size_bytes - min(file.size_bytes, cached_bytes([file.path]))):
                will_need(file)
                if self.read_bytes_per_s < float("inf"):
                    _touch(file)

        def paced_acquire(stream: WeightStream, position: int) -> dict[str, torch.Tensor]:
            paced_will_need(stream._files[position])  # waits for the reading ahead, or reads now
            return acquire(stream, position)

        def paced_read(store: SampleStore, index: int) -> Sample:
            sample = read(store, index)
            with paced(sample.stored_bytes):
                return sample

        def paced_digest(path: Path) -> str:
            with paced(path.stat().st_size):
                return digest(path)

        def paced_sync(path: Path) -> None:
            time.sleep((path.stat().st_size / write_bytes_per_s if path.is_file() else 0.0) + latency_s)
            sync(path)

        TensorFile.will_need = paced_will_need  # type: ignore[method-assign, assignment]
        WeightStream.acquire = paced_acquire  # type: ignore[method-assign, assignment]
        SampleStore.read = paced_read  # type: ignore[method-assign, assignment]
        runtime.bundle.sha256_file = paced_digest
        runtime.atomic.fsync = paced_sync

    def befall(self, fault: str) -> None:
        """Has a fault happen: `disk-full` until the process ends, `failing-read` at the next block."""
        {"disk-full": _fill_disk, "failing-read": _break_next_block}[fault]()


def _touch(file: TensorFile) -> None:
    """Reads a file to its end, as the faults of a page each would."""
    with file.path.open("rb", buffering=0) as opened:
        while opened.read(1 << 20):
            pass


def _fill_disk() -> None:
    """Every file written from now on ends on a device that is full: the kernel itself says so."""
    original = runtime.atomic.atomic_path

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with original(path) as temp:
            temp.symlink_to("/dev/full")
            yield temp

    runtime.atomic.atomic_path = full
    runtime.tensor_file.atomic_path = full


def _break_next_block() -> None:
    """Puts a hole under the map of the next block that is read, as a failed read of flash does: the access itself fails and the
    kernel sends SIGBUS."""
    acquire = WeightStream.acquire

    def broken(stream: WeightStream, position: int) -> dict[str, torch.Tensor]:
        _unmap_content(stream._files[position]._map)
        return acquire(stream, position)

    WeightStream.acquire = broken  # type: ignore[method-assign, assignment]


def _unmap_content(mapped: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    whole = np.frombuffer(mapped, np.uint8)
    with tempfile.TemporaryFile() as empty:
        got = libc.mmap(
            ctypes.c_void_p(whole.ctypes.data),
            ctypes.c_size_t(whole.size),
            mmap.PROT_READ,
            mmap.MAP_PRIVATE | 0x10,  # MAP_FIXED
            empty.fileno(),
            ctypes.c_long(0),
        )
        if got != whole.ctypes.data:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
