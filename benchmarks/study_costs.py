"""What a method's steps cost: memory, time, operations, bytes. Each method in a process of its own, one sample at a time.

    python -m benchmarks.study_costs lora      # one line of JSON

Private memory is beyond the idle process and only while steps are taken: no autoencoder, and a text encoder only where it
learns.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.study_jobs import Job, method_of, task
from host.baselines.base import Task
from host.baselines.ours import Ours
from host.models import EMBEDDED, ModelFolder
from host.models.folder import trim_heap
from runtime.bundle import Bundle
from runtime.memory import MemoryWatch
from runtime.trainer import train

STEPS = 8
LABEL = "trophy"


def cost(name: str, work: Path) -> dict[str, Any]:
    """Measures one method over STEPS optimizer steps, one thread.

    Returns:
        `peak_private_bytes`, `step_ms` (an optimizer step of four samples), `flops` of such a step (a multiply-add as two),
        `result_bytes` of what the user keeps, `flash_bytes` of what must lie on the device to train.
    """
    torch.set_num_threads(1)
    watch = MemoryWatch()
    method = method_of(name)
    job = Job(method=name, label=LABEL, rate=1e-4, steps=STEPS, work=work)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(method, Ours):
            return _of_runtime(method, task(job), Path(folder))
        spent: list[float] = []

        @contextmanager
        def measured() -> Iterator[None]:
            gc.collect()
            trim_heap()
            start = time.perf_counter()
            with watch:
                yield
            spent.append(time.perf_counter() - start)

        # The first run warms up, the second is measured, the third counts operations.
        method.train(replace(task(replace(job, steps=1)), micro_batch=1), Path(folder))
        gc.collect()
        trained = method.train(replace(task(job), micro_batch=1, during=measured), Path(folder))
        counter = FlopCounterMode(display=False)
        method.train(replace(task(replace(job, steps=1)), micro_batch=1, during=lambda: counter), Path(folder))
        result = sum(value.nbytes for value in trained.tensors.values())
        components = ["transformer", *([n for n in trained.model.components() if "text" in n] if trained.words else [])]
        flash = sum(p.nbytes for n in components for p in ModelFolder(EMBEDDED).load(n).parameters())
    return {
        "peak_private_bytes": watch.peak_private_bytes,
        "step_ms": 1e3 * spent[0] / STEPS,
        "flops": counter.get_total_flops(),
        "result_bytes": result,
        "flash_bytes": flash,
    }


def _of_runtime(method: Ours, subject: Task, folder: Path) -> dict[str, Any]:
    exporter = subject.exporter(folder / "bundle", cut=method.cut, patch_policy=method.policy)
    exporter.run(lambda name, cached, seconds: None)
    del exporter
    gc.collect()
    trim_heap()
    bundle = Bundle(folder / "bundle")
    rows: list[dict[str, Any]] = []
    run = train(folder / "bundle", folder / "run", threads=1, micro_batch=1, on_step=rows.append)
    specs = bundle.manifest.programs.methods
    of_sample = specs["loss"].flops
    for block in bundle.manifest.blocks:
        of_sample += specs[f"{block.kind}_forward"].flops + specs[f"{block.kind}_backward"].flops
    return {
        "peak_private_bytes": run["summary"]["peak_private_bytes"],
        "step_ms": statistics.median(row["step_ms"] for row in rows[1:]),
        "flops": of_sample * bundle.manifest.training.accumulation,
        "result_bytes": (folder / "run" / "adapter.safetensors").stat().st_size,
        "flash_bytes": sum(file.bytes for file in bundle.manifest.files.values()),
    }


def main() -> None:
    """Prints the cost of one method."""
    name, work = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(cost(name, work)))


if __name__ == "__main__":
    main()
