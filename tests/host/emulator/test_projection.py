"""Tests of the projection: hand-worked numbers, bounds that hold, and sentences that say what was assumed."""

import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from host.emulator.projection import (
    MIB,
    flash_bytes,
    measure_host_gflops,
    project,
    run_seconds,
    step_operations,
    step_seconds,
)

FLAT = ((0.0, 1.0),)
PHONE: dict[str, Any] = {
    "operations": 600_000_000_000,
    "cpu_seconds": 20.0,
    "host_gflops": None,
    "streamed_bytes": 1000 * MIB,
    "weight_bytes": 500 * MIB,
    "steps": 100,
    "title": "Pixel 8",
    "usable_gflops": (60.0, 120.0),
    "sustained_gflops": (30.0, 60.0),
    "thermal": ((0.0, 1.0), (180.0, 1.0), (600.0, 0.5)),
    "screen_off_share": 0.74,
    "page_cache_bytes": 100 * MIB,
    "read_bytes_per_s": 100 * MIB,
}


def test_a_step_counts_every_block_both_ways_and_the_loss_for_each_sample() -> None:
    flops = {"single_forward": 3, "single_backward": 7, "double_forward": 20, "double_backward": 50, "loss": 1}
    assert step_operations(flops, ["double", "single", "single"], accumulation=4) == 4 * (70 + 10 + 10 + 1)


@pytest.mark.parametrize("missing", ["single_backward", "loss"])
def test_one_method_without_a_count_makes_the_whole_unknown(missing: str) -> None:
    flops = {"single_forward": 3, "single_backward": 7, "loss": 1, missing: 0}
    assert step_operations(flops, ["single"], 1) == 0
    assert step_operations({key: value for key, value in flops.items() if value}, ["single"], 1) == 0


def test_weights_that_the_page_cache_holds_are_not_read_again() -> None:
    assert flash_bytes(1000, 500, 500) == (0, 0)
    assert flash_bytes(1000, 500, 400) == (pytest.approx(200), 1000)
    assert flash_bytes(1000, 500, 0) == (1000, 1000)


def test_least_flash_reading_is_that_of_a_cache_that_keeps_what_was_used_last() -> None:
    """Plays forward and backward passes through a least-recently-used cache of whole blocks."""
    num_blocks, room = 20, 7
    cache: list[int] = []
    read_by_step = []
    for _ in range(5):
        read = 0
        for block in [*range(num_blocks), *reversed(range(num_blocks))]:
            if block in cache:
                cache.remove(block)
            else:
                read += 1
            cache = [*cache, block][-room:]
        read_by_step.append(read)
    assert flash_bytes(2 * num_blocks, num_blocks, room)[0] == pytest.approx(read_by_step[-1])


def test_step_lies_between_full_overlap_and_none() -> None:
    assert step_seconds((5, 10), (2, 3)) == (5, 13)
    assert step_seconds((1, 2), (4, 8)) == (4, 10)


def test_cool_phone_takes_the_same_for_every_step() -> None:
    assert run_seconds(10, (2, 4), (1, 1), FLAT) == pytest.approx((20, 50))


def test_run_slows_down_as_the_phone_heats_up() -> None:
    low, high = run_seconds(100, (1, 2), (0, 0), ((0, 1), (50, 1), (50.001, 0.5)))
    assert low == pytest.approx(50 + 50 * 2, abs=2)
    assert high == pytest.approx(25 * 2 + 75 * 4, abs=4)


def test_heat_does_not_slow_reading() -> None:
    assert run_seconds(10, (1, 1), (3, 3), ((0, 0.5), (1, 0.5)))[0] == pytest.approx(30)


def test_counted_operations_give_time_by_hand() -> None:
    projected = project(**PHONE)
    assert projected is not None
    assert projected["operations_counted"] is True
    assert projected["compute_seconds"] == {"low": 5, "high": 10}
    assert projected["sustained_compute_seconds"] == {"low": 10, "high": 20}
    assert projected["flash_bytes"] == {"low": pytest.approx(800 * MIB), "high": 1000 * MIB}
    assert projected["flash_seconds"] == {"low": pytest.approx(8), "high": 10}
    assert projected["step_seconds"] == {"low": pytest.approx(8), "high": 20}
    assert projected["sustained_step_seconds"] == {"low": 10, "high": 30}
    run = projected["run_seconds"]
    assert run["steps"] == 100
    assert 100 * 8 <= run["low"] <= 100 * 10
    assert 100 * 20 <= run["high"] <= 100 * 30
    json.dumps(projected)


def test_assumptions_are_sentences_with_the_numbers_used() -> None:
    projected = project(**PHONE)
    assert projected is not None
    text = " ".join(projected["assumptions"])
    for part in (
        "A step is 600 GFLOP",
        "counted at export",
        "Pixel 8 does 60 to 120 GFLOP/s of such work while cool and 30 to 60 when hot",
        "A step streams 1,000 MiB; the blocks are 500 MiB on flash, more than the 100 MiB of page cache",
        "800 to 1,000 MiB a step are read, at 105 MB/s",
        "about 74% of the speed",
    ):
        assert part in text
    assert all(sentence.endswith(".") for sentence in projected["assumptions"])
    held = project(**PHONE | {"page_cache_bytes": 512 * MIB})
    assert held is not None
    assert "stay in the 512 MiB of page cache an app may have: after the first step none is read." in " ".join(
        held["assumptions"]
    )
    assert held["step_seconds"] == held["compute_seconds"]


def test_older_bundle_is_scaled_from_cpu_time_and_says_so() -> None:
    projected = project(**PHONE | {"operations": 0, "host_gflops": 30.0})
    assert projected is not None
    assert projected["operations"] == 600_000_000_000
    assert projected["operations_counted"] is False
    assert projected["compute_seconds"] == {"low": 5, "high": 10}
    assert "does not count its operations" in projected["assumptions"][0]
    assert "20 CPU seconds a step here, at the 30 GFLOP a matrix product does in one" in projected["assumptions"][0]
    assert "too many" in projected["assumptions"][0]


@pytest.mark.parametrize("change", [{"host_gflops": None}, {"cpu_seconds": 0.0, "host_gflops": 30.0}])
def test_nothing_to_go_by_gives_no_projection(change: dict[str, Any]) -> None:
    assert project(**PHONE | {"operations": 0} | change) is None


def test_host_speed_agrees_with_products_timed_by_hand() -> None:
    matrix, out = np.ones((64, 64), np.float32), np.empty((64, 64), np.float32)
    best = math.inf
    for _ in range(30):
        start = time.thread_time()
        for _ in range(2000):
            np.matmul(matrix, matrix, out=out)
        best = min(best, time.thread_time() - start)
    assert measure_host_gflops(0.2) == pytest.approx(2000 * 2 * 64**3 / best / 1e9, rel=0.5)


def test_host_speed_is_the_same_on_a_busy_machine() -> None:
    quiet = measure_host_gflops(0.3)
    code = "import numpy as np\na = np.ones((1500, 1500), np.float32)\nwhile True: a @ a"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        time.sleep(1.5)
        assert measure_host_gflops(0.5) == pytest.approx(quiet, rel=0.4)
    finally:
        for process in busy:
            process.kill()
            process.wait()
