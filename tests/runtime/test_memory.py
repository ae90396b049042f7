import mmap

import numpy as np
import pytest

from runtime import memory
from runtime.memory import MIB, MemoryWatch, memory_bytes, storage_read_bytes


def touched(size: int) -> mmap.mmap:
    """Anonymous pages new to the process; an array may get freed ones of the heap, which have been counted already."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    return pages


def test_private_memory_grows_by_what_is_allocated_and_touched():
    before = memory_bytes()[0]
    with touched(64 * MIB):
        assert 60 * MIB < memory_bytes()[0] - before < 70 * MIB
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
        with touched(48 * MIB):
            watch._stop.wait(0.2)
    assert watch.peak_private_bytes > 40 * MIB
    assert watch.read()[0] < 16 * MIB


def test_storage_reads_never_go_back():
    first = storage_read_bytes()
    assert storage_read_bytes() >= first >= 0


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage"),
    [
        ("7:cpu,memory:/app", "memory/app", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("0::/app", "app", "memory.max", "memory.current"),
    ],
)
def test_a_cgroups_limit_bounds_what_is_available(tmp_path, monkeypatch, line, folder, limit, usage):
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    (tmp_path / "cgroup").write_text(f"3:blkio:/other\n{line}\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, value in (("MEMINFO", "meminfo"), ("CGROUP", "cgroup"), ("CGROUP_MOUNT", "")):
        monkeypatch.setattr(memory, name, tmp_path / value)
    assert memory.available_bytes() == 2048 * 1024
    (tmp_path / folder / limit).write_text("1000000\n")
    (tmp_path / folder / usage).write_text("700000\n")
    (tmp_path / folder / "memory.stat").write_text("anon 600000\ninactive_file 50000\n")
    assert memory.available_bytes() == 350000
    (tmp_path / folder / usage).write_text("2000000\n")
    assert memory.available_bytes() == 0
    (tmp_path / folder / limit).write_text("max\n")
    assert memory.available_bytes() == 2048 * 1024
