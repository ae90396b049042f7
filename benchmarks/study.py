"""The study: every method on held-out subjects of the embedded world, tuned alike, drawn, scored, in one table.

    make study                               # hours on 2 cores; what was done before is not done again
    python -m benchmarks.study --quick       # the same code in two minutes: one subject, three methods, few steps

Writes `results/study.json` (every score of every picture); `benchmarks/study_page.py` makes the page, the README's table and
the pictures of it.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.study_jobs import (
    BASE,
    STEP,
    SUBJECTS,
    TUNING,
    WORK,
    Job,
    ablations,
    base_job,
    methods,
    run_job,
    side_of,
)
from benchmarks.study_page import write_sheet
from benchmarks.study_scores import scores_of, tuning_score
from host.tiny_base import world
from host.tiny_base.subject import write_subject
from runtime import atomic

RESULTS = Path(__file__).parent / "results" / "study.json"
STEPS = 200
MOST_RATES = 5
"""Rates the search tries at most for a method: three, then on as long as the best is at the edge."""
QUICK_METHODS = ("lora", "no-residuals", "ours-50")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is done."""

    methods: tuple[str, ...]
    ablations: tuple[str, ...]
    subjects: tuple[str, ...]
    tuning: tuple[str, ...]
    steps: int
    most_rates: int


FULL = Scale(
    methods=tuple(methods()),
    ablations=tuple(ablations()),
    subjects=tuple(SUBJECTS),
    tuning=tuple(TUNING),
    steps=STEPS,
    most_rates=MOST_RATES,
)
QUICK = Scale(methods=QUICK_METHODS, ablations=(), subjects=("dango",), tuning=("trophy",), steps=8, most_rates=1)


class Study:
    """Runs jobs on worker processes, one thread each, and keeps the results file up to date."""

    def __init__(self, scale: Scale, work: Path, results: Path, workers: int) -> None:
        """Draws the subjects' photos into `work`; results that are there already are kept."""
        self.scale, self.work, self.results, self.workers = scale, work, results, workers
        self.found: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
        for label in (*scale.subjects, *scale.tuning):
            folder = work / "photos" / label.replace(" ", "-")
            if not folder.is_dir():
                write_subject(label, folder)

    def run(self) -> dict[str, Any]:
        """Search, then all rows subject by subject, then costs."""
        rates = self._search()
        rates |= {name: rates[ablations()[name].rate_of] for name in self.scale.ablations}
        for label in self.scale.subjects:
            base = base_job(self._job(BASE, label, 0.0))
            wanted = [self._job(name, label, rates[name]) for name in (*self.scale.methods, *self.scale.ablations)]
            open_jobs = [job for job in (base, *wanted) if not self._has(job)]
            self._all([base, *open_jobs] if open_jobs else [])
            self._score(open_jobs)
            if open_jobs:
                sheet = self.results.parent / "study" / f"{label.replace(' ', '-')}.jpg"
                write_sheet([(self.found["rows"][job.method]["title"], job) for job in (base, *wanted)], sheet)
        self._costs()
        return self.found

    def _has(self, job: Job) -> bool:
        """Whether the results have this row, at this rate."""
        row = self.found.get("rows", {}).get(job.method, {})
        return job.label in row.get("subjects", {}) and row["rate"] == rounded(job.rate)

    def _job(self, method: str, label: str, rate: float, drift: bool = True) -> Job:
        drift = drift and side_of(method) == world.SIDE
        return Job(method=method, label=label, rate=rate, steps=self.scale.steps, work=self.work, drift=drift)

    def _search(self) -> dict[str, float]:
        """The best rate of each method on the tuning subjects."""
        before = self.found.get("search", {})
        tried = {name: {float(r): score for r, score in before.get(name, {}).items()} for name in self.scale.methods}
        open_rates = {
            name: next_rates(tried[name], self.scale.most_rates)
            if tried[name]
            else first_rates(methods()[name][1], self.scale.most_rates)
            for name in self.scale.methods
        }
        while any(open_rates.values()):
            asked = {
                (name, rate): [self._job(name, label, rate, drift=False) for label in self.scale.tuning]
                for name, rates in open_rates.items()
                for rate in rates
            }
            self._all([job for jobs in asked.values() for job in jobs])
            for (name, rate), jobs in asked.items():
                tried[name][rate] = tuning_score(jobs)
            open_rates = {name: next_rates(tried[name], self.scale.most_rates) for name in self.scale.methods}
            self._keep(search={name: {str(r): round(t[r], 5) for r in sorted(t)} for name, t in tried.items()})
        return {name: max(scores, key=scores.__getitem__) for name, scores in tried.items()}

    def _all(self, jobs: Sequence[Job]) -> None:
        """Runs and scores what is not done yet; drift is told from the base's pictures, so all are drawn before."""
        unscored = [job for job in jobs if not (job.dir / "scores.json").is_file()]
        if not unscored:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            for number, done in enumerate(pool.map(run_job, unscored), 1):
                print(f"{number}/{len(unscored)} {done['method']} {done['label']} {done['rate']:.0e}", flush=True)
            list(pool.map(scores_of, unscored))

    def _score(self, jobs: Sequence[Job]) -> None:
        rows = self.found.get("rows", {})
        for job in jobs:
            record = json.loads((job.dir / "job.json").read_text())
            entry = rows.setdefault(job.method, {"rate": None, "subjects": {}})
            if entry["rate"] != rounded(job.rate):
                entry = rows[job.method] = {"rate": rounded(job.rate), "subjects": {}}
            entry["title"] = record["title"]
            kept = {name: record[name] for name in ("seconds", "first_loss", "last_loss") if name in record}
            entry["subjects"][job.label] = kept | scores_of(job)
        self._keep(rows=rows)

    def _costs(self) -> None:
        costs = self.found.get("costs", {})
        for name in self.scale.methods:
            if name in costs:
                continue
            command = [sys.executable, "-m", "benchmarks.study_costs", name, str(self.work)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the cost of {name} could not be measured: {done.stderr[-2000:]}")
            costs[name] = json.loads(done.stdout.splitlines()[-1])
            self._keep(costs=costs)

    def _keep(self, **parts: Any) -> None:
        packages = ("torch", "executorch", "diffusers", "peft")
        self.found |= parts | {
            "steps": self.scale.steps,
            "versions": {name: metadata.version(name) for name in packages},
        }
        text = json.dumps(self.found, indent=1)
        # Scores of one row on one line.
        text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
        with atomic.atomic_path(self.results) as temp:
            temp.write_text(text + "\n")


def rounded(rate: float) -> float:
    """Two digits are what tells rates apart."""
    return float(f"{rate:.1e}")


def first_rates(start: float, most: int) -> list[float]:
    """The start of a search and its two neighbours."""
    return [start, rounded(start / STEP), rounded(start * STEP)][:most]


def next_rates(tried: dict[float, float], most: int) -> list[float]:
    """The rate beyond the best one, if that is at an edge of what was tried and there is room."""
    best = max(tried, key=tried.__getitem__)
    if len(tried) >= most:
        return []
    return [rounded(edge * factor) for edge, factor in ((min(tried), 1 / STEP), (max(tried), STEP)) if edge == best]


def main() -> None:
    """Runs the study, or the quick version of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a small version of everything, results in the work folder"
    )
    parser.add_argument("--work-dir", type=Path, help="folder of the jobs (/tmp/pocketdit-study)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes, one thread each")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = options.work_dir or (WORK.with_name(f"{WORK.name}-quick") if options.quick else WORK)
    scale, results = (QUICK, work / "study.json") if options.quick else (FULL, RESULTS)
    Study(scale, work, results, options.workers).run()
    print(f"{results}. Next: python -m benchmarks.study_page")


if __name__ == "__main__":
    main()
