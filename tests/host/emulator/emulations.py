"""Contents of `emulation.json` as `pocketdit emulate` writes them, made up: phases, steps and faults of a plausible run."""

import random
from typing import Any

from host.emulator.device import MIB, load_device
from host.emulator.projection import project

PHASES = ["load", "read", "forward", "loss", "backward", "optimizer", "checkpoint", "adapter"]
BUDGET = 96 * MIB
IDLE = 187 * MIB
ACCUMULATION, BLOCKS = 4, 14


def make_emulation(**changes: Any) -> dict[str, Any]:
    """A run of 20 steps within its budget on cgroup v1; `changes` replace top-level keys."""
    device = load_device("pixel-8")
    samples = _samples(20)
    top = max(samples, key=lambda row: row[1])
    steps = _steps(20)
    emulation: dict[str, Any] = {
        "schema": "pocketdit.emulation/1",
        "date": "2026-03-02T10:20:30+00:00",
        "version": "0.1.0",
        "bundle": "bundles/sana-dog",
        "command": ["pocketdit", "emulate", "bundles/sana-dog", "--device", "pixel-8", "--budget", "96MiB"],
        "device": device.to_dict(),
        "verdict": "within",
        "exit_status": 0,
        "reason": "20 steps took at most 61.4 MiB of private memory beyond idle, the budget is 96 MiB.",
        "enforcement": {
            "memory": "cgroup v1",
            "cpu": "cgroup v1",
            "flash": "blkio",
            "notes": ["The host's page cache is shared: pages another process brought in are not read from flash."],
            "page_cache_dropped": True,
            "locked_bytes": 0,
            "swap_bytes": 0,
            "cpu_cores": 1.6,
        },
        "budget": {
            "private_bytes": BUDGET,
            "basis": "--budget",
            "total_bytes": None,
            "page_cache_bytes": device.page_cache_bytes,
            "kernel_limit_bytes": IDLE + 140 * MIB + BUDGET + device.page_cache_bytes,
        },
        "idle": {"private_bytes": IDLE, "file_bytes": 142 * MIB, "kernel_anon_bytes": IDLE + MIB},
        "peak": {
            "private_bytes": top[1],
            "total_private_bytes": top[1] + IDLE,
            "kernel_anon_bytes": top[1] + IDLE + 3 * MIB,
            "file_bytes": max(row[2] for row in samples),
            "planned_private_bytes": 58 * MIB,
            "seconds": top[0],
            "phase": PHASES[top[4]],
            "block": top[5],
            "step": top[6],
        },
        "breach": None,
        "kernel": {"oom_kills": 0, "limit_hits": 12, "throttled_seconds": 3.4},
        "samples": samples,
        "phases": PHASES,
        "steps": steps,
        "flash": {
            "read_bytes": 1630 * MIB,
            "written_bytes": 9 * MIB,
            "read_limit": 2.1e9,
            "write_limit": 4e8,
            "latency_us": 80.0,
            "written_per_step_bytes": 460_000,
            "writes": {"checkpoints": 7 * MIB, "metrics": 22_000, "adapter": 2 * MIB},
        },
        "faults": [],
        "adapter_equals_undisturbed": None,
        "projection": project(
            operations=412_000_000_000,
            cpu_seconds=1.9,
            host_gflops=None,
            streamed_bytes=560 * MIB,
            weight_bytes=280 * MIB,
            steps=400,
            title=device.title,
            usable_gflops=device.usable_gflops,
            sustained_gflops=device.sustained_gflops,
            thermal=device.thermal,
            screen_off_share=device.screen_off_share,
            page_cache_bytes=device.page_cache_bytes,
            read_bytes_per_s=device.flash.read_bytes_per_s,
        ),
        "summary": {
            "steps": 20,
            "step_ms_median": 968.0,
            "seconds": 21.6,
            "first_loss": 0.2213,
            "last_loss": 0.1894,
        },
    }
    return emulation | changes


def make_breach() -> dict[str, Any]:
    """Over budget in the backward pass of step 3, seen by the sampler."""
    samples = [row for row in _samples(3) if row[6] < 3 or row[4] < 5]
    seconds, _, file, _, _, _, _ = samples[-1]
    samples.append([seconds + 0.02, 97 * MIB, file, 97 * MIB + IDLE + MIB, 4, 7, 3])
    breach = {
        "seconds": seconds + 0.02,
        "phase": "backward",
        "block": 7,
        "step": 3,
        "private_bytes": 97.3 * MIB,
        "by": "sampler",
    }
    made = make_emulation(
        samples=samples, steps=_steps(2), breach=breach, verdict="over", exit_status=1, projection=None
    )
    made["reason"] = "Step 3 held 97.3 MiB of private memory in the backward of block 7, the budget is 96 MiB."
    made["peak"] |= {
        "private_bytes": int(97.3 * MIB),
        "seconds": seconds + 0.02,
        "phase": "backward",
        "block": 7,
        "step": 3,
    }
    made["peak"] |= {"total_private_bytes": int(97.3 * MIB) + IDLE, "kernel_anon_bytes": int(97.3 * MIB) + IDLE}
    made["summary"] |= {"steps": 2, "seconds": 5.1}
    return made


def make_faulted() -> dict[str, Any]:
    """Within budget through six faults, one of them not recovered from in time."""
    kinds = (
        ("kill", 3.1, 2, "SIGKILL between two steps; went on from checkpoint 2", True),
        ("low-memory", 6.4, 5, "paused at the end of the step, state saved", True),
        ("disk-full", 9.0, 8, "no space while checkpointing; the one before was kept", True),
        ("slow-reads", 12.2, 11, "reads at a tenth for 3 s", True),
        ("failing-read", 15.8, 14, "EIO on <b>block</b> 7", False),
        ("thermal", 18.1, 16, "CPU quota halved", True),
    )
    faults = [dict(zip(("kind", "seconds", "step", "detail", "recovered"), values, strict=True)) for values in kinds]
    return make_emulation(faults=faults, adapter_equals_undisturbed=True)


def make_sampled() -> dict[str, Any]:
    """Within budget, but nothing was enforced."""
    notes = [
        "No cgroup could be made (read-only file system): memory is sampled every 20 ms and the run killed when over.",
        "The CPU is not limited, step times are this machine's.",
        "The page cache could not be dropped (needs root): part of the weights was not read from flash.",
    ]
    made = make_emulation()
    made["enforcement"] = {
        "memory": "sampling",
        "cpu": "none",
        "flash": "throttled reader",
        "notes": notes,
        "page_cache_dropped": False,
        "locked_bytes": 3 * MIB,
        "swap_bytes": 0,
    }
    made["budget"]["kernel_limit_bytes"] = None
    made["kernel"] = {"oom_kills": 0, "limit_hits": None, "throttled_seconds": None}
    made["peak"]["kernel_anon_bytes"] = None
    made["samples"] = [[*row[:3], None, *row[4:]] for row in made["samples"]]
    return made


def make_killed() -> dict[str, Any]:
    """Killed by the kernel while loading: no step, hardly a sample."""
    samples = [[0.02 * n, n * 9 * MIB, n * 4 * MIB, n * 9 * MIB + IDLE, 0, -1, 0] for n in range(11)]
    breach = {"seconds": 0.22, "phase": "load", "block": None, "step": 0, "private_bytes": 90 * MIB, "by": "kernel"}
    made = make_emulation(
        samples=samples,
        steps=[],
        breach=breach,
        verdict="killed",
        exit_status=1,
        projection=None,
        faults=[],
        summary={},
    )
    made["reason"] = "The kernel killed the process while loading, at 90 MiB of private memory beyond idle."
    made["kernel"]["oom_kills"] = 1
    made["peak"] |= {"private_bytes": 90 * MIB, "seconds": 0.2, "phase": "load", "block": None, "step": 0}
    made["peak"] |= {
        "total_private_bytes": 90 * MIB + IDLE,
        "kernel_anon_bytes": 90 * MIB + IDLE,
        "file_bytes": 40 * MIB,
    }
    return made


def _steps(count: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    rows = []
    for step in range(1, count + 1):
        read, forward, backward = (abs(draw.gauss(mean, mean / 10)) for mean in (90 if step > 1 else 400, 280, 540))
        row = {"step": step, "read_ms": read, "forward_ms": forward, "backward_ms": backward}
        row |= {"optimizer_ms": 6.0, "other_ms": 40.0, "step_ms": read + forward + backward + 46.0}
        row |= {"loss": 0.22 - 0.001 * step, "seconds": 1.2 + step, "streamed_bytes": 560 * MIB}
        row |= {"flash_read_bytes": (281 if step == 1 else draw.randrange(60, 90)) * MIB}
        rows.append(row)
    return rows


def _samples(count: int) -> list[list[Any]]:
    draw = random.Random(2)
    rows: list[list[Any]] = []
    seconds = 0.0

    def add(phase: str, block: int, step: int, private_mib: float, file_mib: float) -> None:
        nonlocal seconds
        private = int(private_mib * MIB)
        kernel = private + IDLE + draw.randrange(-MIB, 2 * MIB)
        rows.append([round(seconds, 3), private, int(file_mib * MIB), kernel, PHASES.index(phase), block, step])
        seconds += 0.02

    for index in range(60):
        add("load", -1, 0, min(18, index * 0.4), 142 + index)
    for step in range(1, count + 1):
        for index in range(48):
            block = index % 24 * BLOCKS // 24
            phase = "forward" if index < 17 else "loss" if index < 19 else "backward" if index < 46 else "optimizer"
            block = -1 if phase in ("loss", "optimizer") else block if index < 17 else BLOCKS - 1 - block
            if index % 9 == 0 and index < 46:
                phase = "read"
            height = {"read": 36, "forward": 40, "loss": 38, "backward": 55, "optimizer": 30}[phase]
            add(phase, block, step, height + 6 * draw.random(), min(480, 210 + 20 * step + 10 * draw.random()))
        if step % 10 == 0:
            for _ in range(6):
                add("checkpoint", -1, step, 28 + draw.random(), 300)
    for _ in range(4):
        add("adapter", -1, count, 30.0, 300)
    return rows
