"""The workload of the emulator: the product's own training loop, told where it is and what befalls it.

Reads a bundle, writes a run folder, both through `runtime.trainer.train`.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from host.emulator.observe import flash_bytes
from host.emulator.process import Job
from host.emulator.storage import Storage
from runtime import trainer
from runtime.manifest import read_manifest

WRITING = ("checkpoint", "adapter")


def _written_bytes() -> int:
    """What this process had written to flash so far."""
    return flash_bytes(os.getpid())[1]


class _Writes:
    """Bytes written to flash, by what they were for; the rest is the step log and `run.json`."""

    def __init__(self) -> None:
        self._phase, self._before = "", 0
        self.bytes = dict.fromkeys(WRITING, 0)

    def enter(self, phase: str) -> None:
        if self._phase in WRITING:
            self.bytes[self._phase] += _written_bytes() - self._before
        if phase in WRITING:
            self._before = _written_bytes()
        self._phase = phase


def run(job: Job) -> dict[str, Any]:
    """Trains as asked for."""
    spec, storage, writes = job.spec, Storage(), _Writes()
    if spec["throttle"] is not None:
        storage.throttle(**spec["throttle"])
    bundle, stopping = Path(spec["bundle"]), False
    settings = dataclasses.replace(read_manifest(bundle).training, **spec["settings"])

    def on_phase(phase: str, step: int, block: int | None) -> None:
        job.at(phase, step, block)
        if phase in WRITING or writes._phase in WRITING:
            writes.enter(phase)

    def on_start(made: dict[str, Any]) -> None:
        job.send("start", **{name: made[name] for name in ("planned_private_bytes", "threads", "micro_batch")})

    def on_step(row: dict[str, Any]) -> None:
        nonlocal stopping
        job.send("step", row=row, cpu_seconds=time.process_time())
        if not spec["lockstep"]:
            return
        order = job.order()
        stopping = order.get("pause", False)
        if "storage" in order:
            storage.befall(order["storage"])
        if "read_bytes_per_s" in order:
            storage.read_bytes_per_s = order["read_bytes_per_s"]

    made = trainer.train(
        bundle,
        Path(spec["run_dir"]),
        settings,
        budget_mib=job.budget_mib,
        threads=spec["threads"],
        on_start=on_start,
        on_step=on_step,
        on_phase=on_phase,
        should_stop=lambda: stopping,
    )
    writes.enter("")
    return {"status": made["status"], "writes": writes.bytes, "written_bytes": _written_bytes()}
