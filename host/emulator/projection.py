"""How long a step would take on the device: arithmetic from counted operations and streamed bytes, never a measurement.

Reads and writes nothing; `pocketdit emulate` puts the result beside what it measured, and the report keeps the two apart.
Bounds, not an estimate of the mean: the low end hides all reading behind computing, the high end none of it.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.memory import MIB

GIGA = 1e9

Bounds = tuple[float, float]
"""Low and high."""


def step_operations(flops: Mapping[str, int], kinds: Sequence[str], accumulation: int) -> int:
    """Operations of one optimizer step, a multiply-add as two; 0 if the bundle does not count those of some method.

    Args:
        flops: Operations of one call by method, as in the manifest; 0 is not counted.
        kinds: Kind of each trained block, in running order.
        accumulation: Samples of a step.
    """
    calls = [f"{kind}_{way}" for kind in kinds for way in ("forward", "backward")] + ["loss"]
    counts = [flops.get(call, 0) for call in calls]
    return accumulation * sum(counts) if all(counts) else 0


def measure_host_gflops(seconds: float = 0.3) -> float:
    """fp32 GFLOP per CPU second of one core of this machine, from matrix products; the median of what fits into `seconds`.

    The products are small, for BLAS then stays on one thread: threads that wait for each other on a busy machine burn CPU
    time, and the same product at 512 a side measured 11 to 250 GFLOP. These agree within 10 %, busy or not.
    """
    side, count = 64, 512
    matrices = np.full((count, side, side), 0.5, dtype=np.float32)
    out = np.matmul(matrices, matrices)
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while not speeds or time.perf_counter() < end:
        start = time.thread_time()
        np.matmul(matrices, matrices, out=out)
        spent = time.thread_time() - start
        if spent > 0:
            speeds.append(2 * count * side**3 / spent / GIGA)
    return statistics.median(speeds)


def flash_bytes(streamed_bytes: float, weight_bytes: float, page_cache_bytes: float) -> Bounds:
    """What a step reads from flash.

    Blocks are used to and fro, forward and then backward. The least is read if the page cache keeps the blocks used last: all
    but what it holds. The most is read if it keeps none, as when the runtime drops each block behind itself, which it does
    where memory cannot hold them all.

    Args:
        streamed_bytes: What a step takes from the weight files and the sample store, read or not.
        weight_bytes: Size of the weight files of all trained blocks.
        page_cache_bytes: What of them may stay in memory.
    """
    if weight_bytes <= page_cache_bytes:
        return 0.0, 0.0
    return streamed_bytes * (1 - page_cache_bytes / weight_bytes), float(streamed_bytes)


def step_seconds(compute_seconds: Bounds, flash_seconds: Bounds) -> Bounds:
    """Low: the longer of computing and reading, for the runtime reads ahead on a thread. High: one after the other."""
    return max(compute_seconds[0], flash_seconds[0]), compute_seconds[1] + flash_seconds[1]


def thermal_share(thermal: Sequence[tuple[float, float]], seconds: float) -> float:
    """Share of full speed after that long under full load: linear between the points, flat after the last."""
    times, shares = zip(*thermal, strict=True)
    return float(np.interp(seconds, times, shares))


def run_seconds(
    steps: int, compute_seconds: Bounds, flash_seconds: Bounds, thermal: Sequence[tuple[float, float]]
) -> Bounds:
    """Time of that many steps in a row, slower as the phone heats up.

    Args:
        steps: Optimizer steps.
        compute_seconds: Of one step on the cool phone.
        flash_seconds: Of one step; heat does not slow reading.
        thermal: Points (seconds under full load, share of full speed), linear between, flat after the last.
    """
    low = high = 0.0
    for _ in range(steps):
        low_share, high_share = thermal_share(thermal, low), thermal_share(thermal, high)
        low += max(compute_seconds[0] / low_share, flash_seconds[0])
        high += compute_seconds[1] / high_share + flash_seconds[1]
    return low, high


def project(
    *,
    operations: int,
    cpu_seconds: float,
    host_gflops: float | None,
    streamed_bytes: float,
    weight_bytes: int,
    steps: int,
    title: str,
    usable_gflops: Bounds,
    sustained_gflops: Bounds,
    thermal: Sequence[tuple[float, float]],
    screen_off_share: float,
    page_cache_bytes: int,
    read_bytes_per_s: float,
) -> dict[str, Any] | None:
    """Projects the time of a step and of a whole run.

    Args:
        operations: Of one optimizer step, `step_operations`; 0 is not counted.
        cpu_seconds: CPU time of one step on this machine, all threads; used only where operations are not counted.
        host_gflops: `measure_host_gflops`; None where operations are counted.
        streamed_bytes: What one step takes from the weight files and the sample store.
        weight_bytes: Size of the weight files of all trained blocks.
        steps: Optimizer steps of a whole run.
        title: The device's name, for the sentences.
        usable_gflops: What the device reaches while cool.
        sustained_gflops: What it reaches when hot.
        thermal: Its thermal curve, see `run_seconds`.
        screen_off_share: Share of its speed that is left while the screen is off.
        page_cache_bytes: What of an app's files may stay in memory.
        read_bytes_per_s: Of the flash.

    Returns:
        The table `projection` of emulation.json: bounds as `{"low", "high"}`, and the assumptions as sentences. None if
        there is nothing to go by: operations neither counted nor to be had from CPU time.
    """
    counted = operations > 0
    if not counted:
        operations = round(cpu_seconds * (host_gflops or 0) * GIGA)
    if operations <= 0:
        return None
    # A fast phone makes the low end: bounds of speed and of time are crosswise.
    cool, hot = ((operations / GIGA / high, operations / GIGA / low) for low, high in (usable_gflops, sustained_gflops))
    read = flash_bytes(streamed_bytes, weight_bytes, page_cache_bytes)
    flash = (read[0] / read_bytes_per_s, read[1] / read_bytes_per_s)
    return {
        "step_seconds": _bounds(step_seconds(cool, flash)),
        "sustained_step_seconds": _bounds(step_seconds(hot, flash)),
        "run_seconds": {"steps": steps, **_bounds(run_seconds(steps, cool, flash, thermal))},
        "compute_seconds": _bounds(cool),
        "sustained_compute_seconds": _bounds(hot),
        "flash_seconds": _bounds(flash),
        "flash_bytes": _bounds(read),
        "operations": operations,
        "operations_counted": counted,
        "assumptions": [
            _operations_sentence(operations, counted, cpu_seconds, host_gflops),
            f"{title} does {usable_gflops[0]:g} to {usable_gflops[1]:g} GFLOP/s of such work while cool and "
            f"{sustained_gflops[0]:g} to {sustained_gflops[1]:g} when hot: fp32, with the screen on, nothing else running.",
            _flash_sentence(streamed_bytes, weight_bytes, page_cache_bytes, read, read_bytes_per_s),
            "Low end: reading is hidden behind computing, as the next block is read on a thread. High end: the two follow "
            "each other.",
            f"With the screen off the operating system leaves about {screen_off_share:.0%} of the speed of all cores.",
            "Left out: the optimizer, checkpoints, latency of the flash, memory bandwidth, a battery saver.",
        ],
    }


def _bounds(bounds: Bounds) -> dict[str, float]:
    return {"low": bounds[0], "high": bounds[1]}


def _operations_sentence(operations: int, counted: bool, cpu_seconds: float, host_gflops: float | None) -> str:
    amount = f"{operations / GIGA:,.3g} GFLOP"
    if counted:
        return f"A step is {amount}: products and convolutions, counted at export; all else is taken as free."
    return (
        f"The bundle does not count its operations (it was made by an older version): {cpu_seconds:.3g} CPU seconds a step "
        f"here, at the {host_gflops:.3g} GFLOP a matrix product does in one, are taken as {amount}. That is too many, for not "
        "all of a step is products: export the bundle again for the count."
    )


def _flash_sentence(streamed: float, weights: float, cache: float, read: Bounds, rate: float) -> str:
    start = f"A step streams {streamed / MIB:,.0f} MiB; the blocks are {weights / MIB:,.0f} MiB on flash"
    kept = f"the {cache / MIB:,.0f} MiB of page cache an app may have"
    if read[1] == 0:
        return f"{start} and stay in {kept}: after the first step none is read."
    return (
        f"{start}, more than {kept}: {read[0] / MIB:,.0f} to {read[1] / MIB:,.0f} MiB a step are read, at "
        f"{rate / 1e6:,.0f} MB/s."
    )
