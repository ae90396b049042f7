"""The workload of the emulator: the product's own training loop, told where it is and what befalls it.

Reads a bundle, writes a run folder, both through `runtime.trainer.train`.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

from host.emulator.process import Job
from host.emulator.storage import Storage
from runtime import trainer
from runtime.manifest import read_manifest


def run(job: Job) -> dict[str, Any]:
    """Trains as asked for."""
    spec, storage = job.spec, Storage()
    if spec["throttle"] is not None:
        storage.throttle(**spec["throttle"])
    bundle, stopping = Path(spec["bundle"]), False
    settings = dataclasses.replace(read_manifest(bundle).training, **spec["settings"])

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
        on_phase=job.at,
        should_stop=lambda: stopping,
    )
    return {"status": made["status"]}
