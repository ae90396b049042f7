"""The schedule of faults, and the flash seen from inside the process."""

import random
import subprocess
import sys

import pytest

from host.emulator.faults import KINDS, checkpoint_every, parse_kinds, schedule
from runtime.bundle import Bundle


def test_each_fault_has_a_part_of_the_run_of_its_own():
    for seed in range(50):
        steps = [fault.step for fault in schedule(KINDS, 24, random.Random(seed))]
        assert steps == sorted(set(steps))
        assert steps[0] >= 1
        assert steps[-1] < 24
    assert checkpoint_every(KINDS, 24, 50) == 1
    assert checkpoint_every(("kill",), 20, 50) == 5
    assert checkpoint_every((), 20, 50) == 50


def test_too_many_faults_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="7 faults in 10 steps, expected at least 16"):
        schedule(KINDS, 10, random.Random(0))
    with pytest.raises(ValueError, match="got 'flood', expected some of kill,low-memory"):
        parse_kinds("kill, flood")
    assert parse_kinds("kill,thermal") == ("kill", "thermal")


def inside(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the wrappers stay."""
    head = "import sys\nfrom pathlib import Path\nfrom host.emulator.storage import Storage\nstorage = Storage()\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_throttled_reader_takes_as_long_as_the_flash_would(bundle_dir):
    bundle = Bundle(bundle_dir)
    size = sum((bundle_dir / block.file).stat().st_size for block in bundle.manifest.blocks)
    rate = size / 0.5
    code = f"""
import time
from runtime.bundle import Bundle
from runtime.weight_stream import WeightStream
bundle = Bundle(Path(sys.argv[1]))
stream = WeightStream(bundle)
storage.throttle(read_bytes_per_s={rate}, write_bytes_per_s=1e9, latency_us=100)
stream.drops_behind = True
for position in range(len(stream)):
    stream.release(position, again=False)
for _ in range(2):
    start = time.perf_counter()
    for position in range(len(stream)):
        stream.acquire(position)
    print(time.perf_counter() - start)
"""
    done = inside(code, bundle_dir)
    assert done.returncode == 0, done.stderr
    cold, warm = map(float, done.stdout.split())
    assert 0.45 < cold < 1.5
    assert warm < 0.2  # from the page cache


def test_a_failing_read_is_a_bus_error_at_the_access_itself(bundle_dir):
    code = """
from runtime.bundle import Bundle
from runtime.weight_stream import WeightStream
stream = WeightStream(Bundle(Path(sys.argv[1])))
print(float(next(iter(stream.acquire(0).values())).sum()), flush=True)
storage.befall("failing-read")
weights = stream.acquire(1)
print("handed out", flush=True)
next(iter(weights.values())).sum()
print("read")
"""
    done = inside(code, bundle_dir)
    assert done.returncode == -7, done.stderr
    assert done.stdout.splitlines()[1:] == ["handed out"]


def test_a_full_disk_is_the_kernels_own_error_and_nothing_half_is_left(tmp_path):
    code = """
from runtime import atomic
from runtime.errors import StorageFullError
folder = Path(sys.argv[1])
atomic.write_bytes(folder / "kept", b"old")
storage.befall("disk-full")
try:
    atomic.write_bytes(folder / "kept", b"new")
except StorageFullError as error:
    print(error)
"""
    done = inside(code, tmp_path)
    assert "kept was not written: the storage is full" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"
