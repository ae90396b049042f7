"""How stale the tail's residual gets as LoRA moves, and whether a low-rank map can answer for the tail instead.

One command: `python -m benchmarks.tail --rate R`. Trains the study's subjects by block skipping, looks at the true tail on the
way, and fits maps (host/tail_map.py) to what training other subjects, or random LoRA, does to the tail. Settings of a map are
chosen on the tuning subjects; then it is fitted to these as well. Writes `results/tail.json` and the map the study tries.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study_jobs import SUBJECTS, TAIL_MAP, TAIL_SUBJECTS, TUNING, WORK, Job, selected_cut, task
from host import tail_map
from host.baselines.base import Pool, Task, add_lora, states_at
from host.baselines.block_skipping import BlockSkipping
from host.tiny_base.subject import write_subject
from runtime import atomic

CUT = selected_cut(0.5)
RANKS, BANDS, RIDGES = (4, 16, 64), (1, 4, 8), (1e-3, 0.1, 1.0)
RANDOM_SIZES = (0.02, 0.05, 0.1)
"""Standard deviations of B's numbers in random LoRA."""
RESULTS = Path(__file__).parent / "results" / "tail.json"
COUNTS = (1, 2, 4, 8)
"""Subjects a map is fitted to."""
States = tuple[Tensor, Tensor]
"""States (N, S, D) before and behind the tail."""
Pairs = tuple[Tensor, Tensor, Tensor]
"""Changes (N, S, D) of the tail's input and of its residual, and noise levels (N,)."""


class Watch:
    """Looks at the true tail while a method trains with the stored one."""

    def __init__(self, steps: Sequence[int]) -> None:
        """Optimizer steps before which to look."""
        self._steps = steps
        self.states: dict[int, States] = {}
        self.sigmas = torch.empty(0)

    def __call__(self, step: int, pool: Pool, transformer: Any) -> None:
        """See `host.baselines.block_skipping.Watcher`."""
        if step in self._steps:
            num_blocks = len(pool.model.adapter.blocks(transformer))
            before, behind = states_at(pool, transformer, (num_blocks - CUT[1], num_blocks))
            self.states[step] = (before, behind)
            self.sigmas = pool.patches.sigmas


def watched(job_task: Task, steps: Sequence[int]) -> Watch:
    """States on the way through a training with constant residuals."""
    watch = Watch(steps)
    BlockSkipping(title="watched", cut=CUT, watch=watch).train(job_task, Path("unused"))
    return watch


def randomly_changed(job_task: Task) -> Watch:
    """States of the base with random LoRA in its middle, one for each of RANDOM_SIZES; 0 is the base's own."""
    pool = job_task.pool("low-to-high", CUT)
    transformer = pool.model.load("transformer")
    num_blocks = len(pool.model.adapter.blocks(transformer))
    watch = Watch(range(len(RANDOM_SIZES) + 1))
    watch(0, pool, transformer)
    matrices = add_lora(pool, transformer, range(CUT[0], num_blocks - CUT[1]))
    generator = torch.Generator().manual_seed(0)
    for number, size in enumerate(RANDOM_SIZES, 1):
        for name, matrix in matrices.items():
            if "lora_B" in name:
                matrix.data.normal_(0, size, generator=generator)
        watch(number, pool, transformer)
    return watch


def staleness(watch: Watch) -> list[dict[str, float]]:
    """How far input and residual of the tail have moved since they were stored, relative to their sizes."""
    before, behind = watch.states[0]
    stored = behind - before
    return [
        {
            "step": step,
            "input_moved": float((now - before).norm() / before.norm()),
            "residual_error": float((end - now - stored).norm() / stored.norm()),
        }
        for step, (now, end) in sorted(watch.states.items())
    ]


def pairs(watches: Sequence[Watch]) -> Pairs:
    """Changes of the tail's input and of its residual, and the noise levels, of all states but the first."""
    inputs, residuals, sigmas = [], [], []
    for watch in watches:
        later = [states for step, states in sorted(watch.states.items()) if step]
        change, response = tail_map.changes(later, watch.states[0])
        inputs.append(change)
        residuals.append(response)
        sigmas.append(watch.sigmas.repeat(len(later)))
    return torch.cat(inputs), torch.cat(residuals), torch.cat(sigmas)


def settings_tried(fitted: Sequence[Watch], judged: Sequence[Watch]) -> list[dict[str, Any]]:
    """Every setting of a map, fitted to some subjects and judged on others; the best comes first."""
    own, others = pairs(fitted), pairs(judged)
    rows = []
    for rank, bands, ridge in itertools.product(RANKS, BANDS, RIDGES):
        found = tail_map.fit(*own, rank=rank, bands=bands, ridge=ridge)
        shares = {"explained": found.explained(*others), "explained_fitted": found.explained(*own)}
        rows.append(
            {"rank": rank, "bands": bands, "ridge": ridge, "bytes": found.down.nbytes + found.up.nbytes} | shares
        )
        print(json.dumps(rows[-1]), flush=True)
    return sorted(rows, key=lambda row: -row["explained"])


def main() -> None:
    """Prints and writes staleness by step, and what maps explain of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True, help="learning rate of the study's `ours-50`")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work-dir", type=Path, default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    looks = [options.steps * i // 8 for i in range(9)]

    def of(label: str) -> Task:
        job = Job(method="", label=label, rate=options.rate, steps=options.steps, work=options.work_dir)
        if not job.photos_dir.is_dir():
            write_subject(label, job.photos_dir)
        return task(job)

    trained = {label: watched(of(label), looks) for label in (*SUBJECTS, *TUNING, *TAIL_SUBJECTS)}
    random = {label: randomly_changed(of(label)) for label in (*TUNING, *TAIL_SUBJECTS)}
    rows, best = [], None
    for source, watches in {"training other subjects": trained, "random LoRA": random}.items():
        tried = settings_tried([watches[label] for label in TAIL_SUBJECTS], [trained[label] for label in TUNING])
        setting = {name: tried[0][name] for name in ("rank", "bands", "ridge")}
        row: dict[str, Any] = {"source": source, "tried": tried, **setting, "by_count": {}}
        for count in COUNTS:
            labels = (*TUNING, *TAIL_SUBJECTS)[:count]
            found = tail_map.fit(*pairs([watches[label] for label in labels]), **setting)
            row["by_count"][count] = {label: found.explained(*pairs([trained[label]])) for label in SUBJECTS}
        rows.append(row)
        if best is None or tried[0]["explained"] > best[0]:
            best = tried[0]["explained"], found
    assert best is not None
    best[1].save(TAIL_MAP)
    moved = {label: staleness(trained[label]) for label in SUBJECTS}
    result = {"rate": options.rate, "steps": options.steps, "cut": CUT, "staleness": moved, "maps": rows}
    atomic.write_json(RESULTS, result)
    for label, steps in moved.items():
        print(label, " ".join(f"{row['step']:.0f}:{row['residual_error']:.3f}" for row in steps))
    for row in rows:
        means = {count: sum(shares.values()) / len(shares) for count, shares in row["by_count"].items()}
        print(row["source"], {name: row[name] for name in ("rank", "bands", "ridge")}, means)


if __name__ == "__main__":
    main()
