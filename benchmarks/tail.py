"""How stale the tail's residual gets as LoRA moves, and whether a low-rank map can answer for the tail instead.

One command: `python -m benchmarks.tail --rate R`. Trains the study's subjects by block skipping, looks at the true tail on the
way, and fits maps (host/tail_map.py) to what training the tuning subjects, or random LoRA, does to the tail. Writes
`results/tail.json` and the best map, which the study then tries.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study_jobs import SUBJECTS, TAIL_MAP, TUNING, WORK, Job, selected_cut, task
from host import tail_map
from host.baselines.base import Pool, Task, add_lora, states_at
from host.baselines.block_skipping import BlockSkipping
from host.tail_map import TailMap
from runtime import atomic

CUT = selected_cut(0.5)
RANKS, BANDS = (4, 16, 64), (1, 4, 8)
RANDOM_SIZES = (0.02, 0.05, 0.1)
"""Standard deviations of B's numbers in random LoRA."""
RESULTS = Path(__file__).parent / "results" / "tail.json"
States = tuple[Tensor, Tensor]
"""States (N, S, D) before and behind the tail."""


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


def pairs(watches: Sequence[Watch]) -> tuple[Tensor, Tensor, Tensor]:
    """Changes of the tail's input and of its residual, and the noise levels, of all states but the first."""
    inputs, residuals, sigmas = [], [], []
    for watch in watches:
        later = [states for step, states in sorted(watch.states.items()) if step]
        change, response = tail_map.changes(later, watch.states[0])
        inputs.append(change)
        residuals.append(response)
        sigmas.append(watch.sigmas.repeat(len(later)))
    return torch.cat(inputs), torch.cat(residuals), torch.cat(sigmas)


def main() -> None:
    """Prints and writes staleness by step, and what each map explains of each study subject's drift."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True, help="learning rate of the study's `ours-50`")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work-dir", type=Path, default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    looks = [options.steps * i // 8 for i in range(9)]

    def of(label: str) -> Task:
        return task(Job(method="", label=label, rate=options.rate, steps=options.steps, work=options.work_dir))

    tuning = [watched(of(label), looks) for label in TUNING]
    sources = {"training other subjects": tuning, "random LoRA": [randomly_changed(of(label)) for label in TUNING]}
    subjects = {label: watched(of(label), looks) for label in SUBJECTS}
    rows: list[dict[str, Any]] = []
    best: tuple[float, TailMap] | None = None
    for source, watches in sources.items():
        change, response, sigmas = pairs(watches)
        for rank in RANKS:
            for bands in BANDS:
                found = tail_map.fit(change, response, sigmas, rank=rank, bands=bands)
                shares = [found.explained(*pairs([watch])) for watch in subjects.values()]
                row: dict[str, Any] = {
                    "source": source,
                    "rank": rank,
                    "bands": bands,
                    "explained": sum(shares) / len(shares),
                }
                row |= {"explained_fitted": found.explained(change, response, sigmas), "by_subject": shares}
                row["bytes"] = found.down.nbytes + found.up.nbytes
                rows.append(row)
                print(json.dumps(row), flush=True)
                if best is None or row["explained"] > best[0]:
                    best = (row["explained"], found)
    assert best is not None
    best[1].save(TAIL_MAP)
    moved = {label: staleness(watch) for label, watch in subjects.items()}
    result = {"rate": options.rate, "steps": options.steps, "cut": CUT, "staleness": moved, "maps": rows}
    atomic.write_json(RESULTS, result)
    for label, steps in moved.items():
        print(label, " ".join(f"{row['step']:.0f}:{row['residual_error']:.3f}" for row in steps))


if __name__ == "__main__":
    main()
