import mmap

import numpy as np

from runtime.memory import MIB, MemoryWatch, memory_bytes, storage_read_bytes


def test_private_memory_grows_by_what_is_allocated_and_touched():
    before = memory_bytes()[0]
    block = np.ones(64 * MIB, np.uint8)
    assert 60 * MIB < memory_bytes()[0] - before < 70 * MIB
    del block
    assert memory_bytes()[0] - before < 8 * MIB


def test_mapped_files_are_counted_apart(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(32 * MIB))
    private, file_backed = memory_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        np.frombuffer(mapped, np.uint8).sum()
        private_after, file_after = memory_bytes()
    assert private_after - private < 8 * MIB
    assert file_after - file_backed > 28 * MIB


def test_the_watch_sees_a_peak_between_two_readings():
    with MemoryWatch() as watch:
        watch.read()
        block = np.ones(48 * MIB, np.uint8)
        watch._stop.wait(0.2)
        del block
    assert watch.peak_private_bytes > 40 * MIB
    assert watch.read()[0] < 16 * MIB


def test_storage_reads_never_go_back():
    first = storage_read_bytes()
    assert storage_read_bytes() >= first >= 0
