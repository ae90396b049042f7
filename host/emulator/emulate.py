"""The memory-budget emulator: runs the product's training loop under a phone's limits and says whether it keeps within them.

Reads a bundle and a device profile; writes a run folder with `emulation.json` (schema below) beside what training writes.
Command: `pocketdit emulate BUNDLE --device pixel-8 --budget 512MiB`.

The gate is private memory beyond the idle process, of the whole process tree, sampled every 20 ms; the kernel holds everything,
page cache included, to idle memory + budget + the page cache the profile grants.
"""

import random
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from host.emulator import faults as fault_kinds
from host.emulator.attempt import Attempt, Outcome
from host.emulator.device import Device
from host.emulator.faults import Fault
from host.emulator.limits import Group, choose_group
from host.emulator.machine import Machine
from host.emulator.projection import project, step_operations
from host.emulator.recorder import Recorder, thinned
from host.emulator.status import PHASES
from runtime import __version__, atomic
from runtime.manifest import BundleManifest, read_manifest
from runtime.memory import MIB
from runtime.metrics import read_metrics

SCHEMA = "pocketdit.emulation/1"
FILE_NAME = "emulation.json"
ADAPTER = "adapter.safetensors"
WITHIN, OVER, REFUSED = 0, 1, 2
MOST_PROCESSES = 4
"""Starts beyond one per fault after which a run that does not get on is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be emulated."""

    bundle: Path
    device: Device
    run_dir: Path
    budget_bytes: int | None = None
    """Private memory beyond idle; None takes the profile's."""
    total_bytes: int | None = None
    """Instead: everything, interpreter and page cache included."""
    page_cache_bytes: int | None = None
    """None takes the profile's."""
    steps: int | None = None
    faults: tuple[str, ...] = ()
    require_enforcement: bool = False
    workload: str = "host.emulator.training"
    """Module with `run(job)`."""
    seed: int | None = None
    """Of the moments at which faults strike; None draws one."""
    command: tuple[str, ...] = ()


def emulate(request: Request, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Runs the emulation.

    Returns:
        The content of `emulation.json`.

    Raises:
        ValueError: It cannot run: no bundle, contradictory budgets, enforcement required and not to be had.
    """
    manifest = read_manifest(request.bundle)
    if request.total_bytes is not None and (request.budget_bytes, request.page_cache_bytes) != (None, None):
        raise ValueError(
            "--budget-total: got --budget or --page-cache too, expected it alone: it holds the interpreter, training and the "
            "page cache. Leave one out."
        )
    if any(size is not None and size < MIB for size in (request.budget_bytes, request.total_bytes)):
        raise ValueError("--budget: got less than 1 MiB, expected at least that. A number without a unit is MiB.")
    steps = request.steps or manifest.training.steps
    seed = random.SystemRandom().randrange(2**31) if request.seed is None else request.seed
    plan = fault_kinds.schedule(request.faults, steps, random.Random(seed))
    group = choose_group(require=request.require_enforcement)
    try:
        _prepare(request.run_dir)
        machine = Machine(request.bundle, manifest, request.device, group)
        return _Emulation(request, manifest, group, machine, plan, steps, seed, say).run()
    finally:
        group.remove()


def _prepare(run_dir: Path) -> None:
    """An emulation starts from nothing; what is there is only removed if an emulation made it."""
    marker = run_dir / FILE_NAME
    if run_dir.exists() and any(run_dir.iterdir()):
        if not marker.is_file():
            raise ValueError(
                f"{run_dir} is not empty and no emulation made it. An emulation starts anew: give another folder with --run."
            )
        shutil.rmtree(run_dir)
    atomic.write_json(
        marker, {"schema": SCHEMA, "verdict": "failed", "exit_status": 1, "reason": "The emulation did not end."}
    )


class _Emulation:
    """One request under way."""

    def __init__(
        self,
        request: Request,
        manifest: BundleManifest,
        group: Group,
        machine: Machine,
        plan: list[Fault],
        steps: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.request, self.manifest, self.group, self.machine = request, manifest, group, machine
        self.plan, self.steps, self.seed, self.say = plan, steps, seed, say
        self.recorder = Recorder()
        self.kernel_limit: int | None = None

    def run(self) -> dict[str, Any]:
        undisturbed = self._undisturbed() if self.plan else None
        self.machine.drop_page_cache()
        started: float | None = None
        outcome = Outcome("failed")
        for _ in range(sum(fault.kind in fault_kinds.ENDS_PROCESS for fault in self.plan) + MOST_PROCESSES):
            attempt = self._attempt(self.request.run_dir, self.recorder, started)
            outcome = attempt.run()
            started, self.kernel_limit = attempt.started, attempt.kernel_limit or self.kernel_limit
            if outcome.status != "interrupted":
                break
            self.say(f"{outcome.message}; going on")
        else:
            outcome = Outcome("failed", f"The process ended {MOST_PROCESSES} times more than faults were due.")
        made = self._result(outcome, undisturbed, time.monotonic() - started if started else 0.0)
        atomic.write_json(self.request.run_dir / FILE_NAME, made)
        return made

    def _attempt(self, run_dir: Path, recorder: Recorder, started: float | None, limited: bool = True) -> Attempt:
        request = self.request
        every = fault_kinds.checkpoint_every(request.faults, self.steps, self.manifest.training.checkpoint_every)
        return Attempt(
            spec={
                "workload": request.workload,
                "bundle": str(request.bundle),
                "run_dir": str(run_dir),
                "settings": {"steps": self.steps, "checkpoint_every": every},
                "threads": None,
                "cores": self.machine.affinity,
                "throttle": self.machine.throttle if limited else None,
                "lockstep": bool(self.plan) and limited,
            },
            group=self.group,
            machine=self.machine,
            recorder=recorder,
            faults=self.plan if limited else [],
            started=started,
            private_budget=self.private_budget if limited else None,
            total_budget=request.total_bytes if limited else None,
            page_cache_bytes=self.page_cache_bytes if limited else None,
            say=self.say,
        )

    @property
    def private_budget(self) -> int | None:
        """None if the budget is one in all."""
        if self.request.total_bytes is not None:
            return None
        return self.request.budget_bytes or self.request.device.private_budget_bytes

    @property
    def page_cache_bytes(self) -> int:
        if self.request.total_bytes is not None:
            return 0
        given = self.request.page_cache_bytes
        return self.request.device.page_cache_bytes if given is None else given

    def _undisturbed(self) -> Path:
        """The same run without limits and faults, to compare with."""
        run_dir = self.request.run_dir / "undisturbed"
        outcome = self._attempt(run_dir, Recorder(), None, limited=False).run()
        if outcome.status != "complete":
            raise RuntimeError(f"The undisturbed run to compare with did not end well: {outcome.message}")
        self.say(f"undisturbed run done, {self.steps} steps")
        return run_dir

    def _result(self, outcome: Outcome, undisturbed: Path | None, seconds: float) -> dict[str, Any]:
        request, recorder, machine = self.request, self.recorder, self.machine
        budget = self._budget()
        equal = None if undisturbed is None else _same(undisturbed, request.run_dir)
        verdict, reason = self._verdict(outcome, budget, equal)
        read, written = recorder.flash_bytes()
        steps = [recorder.steps[step] for step in sorted(recorder.steps)]
        writes = recorder.writes | {"metrics": max(0, written - sum(recorder.writes.values()))}
        counters = outcome.counters
        return {
            "schema": SCHEMA,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "bundle": str(request.bundle),
            "command": list(request.command),
            "device": request.device.to_dict(),
            "verdict": verdict,
            "exit_status": REFUSED if outcome.status == "refused" else WITHIN if verdict == "within" else OVER,
            "reason": reason,
            "enforcement": machine.enforcement()
            | {"locked_bytes": recorder.locked_bytes, "swap_bytes": recorder.swap_bytes},
            "budget": budget,
            "idle": {
                "private_bytes": recorder.idle.private_bytes,
                "file_bytes": recorder.idle.file_bytes,
                "kernel_anon_bytes": recorder.idle_kernel_bytes,
            },
            "peak": {
                "private_bytes": 0,
                "seconds": 0.0,
                "phase": "idle",
                "block": None,
                "step": 0,
                **recorder.peak,
                "total_private_bytes": max(recorder.most_total_bytes, recorder.idle.private_bytes),
                "kernel_anon_bytes": recorder.most_kernel_bytes,
                "file_bytes": recorder.most_file_bytes,
                "planned_private_bytes": recorder.planned_private_bytes,
            },
            "breach": outcome.breach,
            "kernel": {
                "oom_kills": counters.oom_kills,
                "limit_hits": counters.limit_hits,
                "throttled_seconds": counters.throttled_seconds,
            },
            "samples": [list(row) for row in thinned(recorder.samples)],
            "phases": list(PHASES),
            "steps": steps,
            "flash": {
                "read_bytes": read,
                "written_bytes": written,
                **machine.flash_limits(),
                "written_per_step_bytes": round(written / max(1, len(steps))),
                "writes": writes,
            },
            "faults": [fault.to_dict() for fault in self.plan],
            "fault_seed": self.seed if self.plan else None,
            "adapter_equals_undisturbed": equal,
            "projection": self._projection(steps),
            "summary": _summary(steps, seconds),
        }

    def _budget(self) -> dict[str, Any]:
        request = self.request
        basis = "--budget-total" if request.total_bytes else "--budget" if request.budget_bytes else "profile"
        private = self.private_budget
        if private is None:
            private = max(0, (request.total_bytes or 0) - self.recorder.idle.private_bytes)
        return {
            "private_bytes": private,
            "basis": basis,
            "total_bytes": request.total_bytes,
            "page_cache_bytes": self.page_cache_bytes,
            "kernel_limit_bytes": self.kernel_limit,
        }

    def _verdict(self, outcome: Outcome, budget: dict[str, Any], equal: bool | None) -> tuple[str, str]:
        if outcome.status != "complete":
            verdict = outcome.status if outcome.status in ("over", "killed") else "failed"
            return verdict, outcome.message
        if unstruck := [fault.kind for fault in self.plan if fault.seconds is None or not fault.recovered]:
            return "failed", f"The run ended before it had struck and recovered from: {', '.join(unstruck)}."
        if equal is False:
            return (
                "failed",
                "After the faults the adapter or the losses differ from those of the undisturbed run: something was lost.",
            )
        peak = self.recorder.peak.get("private_bytes", 0)
        held = f"{len(self.recorder.steps)} steps held at most {peak / MIB:.1f} MiB of private memory beyond idle"
        if budget["total_bytes"] is not None:
            total, limit = self.recorder.most_total_bytes / MIB, budget["total_bytes"] / MIB
            return "within", f"{held}, {total:.1f} MiB in all; the budget is {limit:.0f} MiB in all."
        return "within", f"{held}; the budget is {budget['private_bytes'] / MIB:.0f} MiB."

    def _projection(self, steps: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not steps or not self.recorder.cpu_seconds:
            return None
        manifest, device = self.manifest, self.request.device
        flops = {name: method.flops for name, method in manifest.programs.methods.items()}
        sizes = [manifest.files[name].bytes for name in {block.file for block in manifest.blocks}]
        operations = step_operations(flops, [block.kind for block in manifest.blocks], manifest.training.accumulation)
        return project(
            operations=operations,
            cpu_seconds=statistics.median(self.recorder.cpu_seconds),
            host_gflops=None if operations else self.machine.host_gflops,
            streamed_bytes=statistics.median(row["streamed_bytes"] for row in steps),
            weight_bytes=sum(sizes),
            steps=manifest.training.steps,
            title=device.title,
            usable_gflops=device.usable_gflops,
            sustained_gflops=device.sustained_gflops,
            thermal=device.thermal,
            screen_off_share=device.screen_off_share,
            page_cache_bytes=self.page_cache_bytes or device.page_cache_bytes,
            read_bytes_per_s=device.flash.read_bytes_per_s,
        )


def _summary(steps: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    if not steps:
        return {"steps": 0, "seconds": seconds}
    return {
        "steps": len(steps),
        "step_ms_median": statistics.median(row["step_ms"] for row in steps),
        "seconds": seconds,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


def _same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same adapter, byte for byte, and had the same loss at each step."""
    adapters = [run / ADAPTER for run in (one, other)]
    if not all(path.is_file() for path in adapters):
        return False
    traces = [[(row["step"], row["loss"]) for row in read_metrics(run)] for run in (one, other)]
    return adapters[0].read_bytes() == adapters[1].read_bytes() and traces[0] == traces[1]
