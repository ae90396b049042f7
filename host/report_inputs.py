"""What the report of a run reads, and what its numbers are when some were never measured.

Reads `run.json`, `metrics.jsonl` and `pictures/pictures.json` of a run, `manifest.json` of its bundle. Writes nothing.
Keep the keys in sync with runtime/trainer.py, runtime/manifest.py and host/generate.py.
Command: `pocketdit report RUN`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from runtime.metrics import read_metrics

RUN_SCHEMA = "pocketdit.run/1"
MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportInputs:
    """A run and its bundle as they lie on disk; a missing optional file is an empty dictionary."""

    run_dir: Path
    """Folder that training wrote."""
    bundle_dir: Path
    """Folder that the run was trained from."""
    run: dict[str, Any]
    """`run.json`."""
    rows: list[dict[str, Any]]
    """`metrics.jsonl`, the rows that have a step."""
    pictures: dict[str, Any]
    """`pictures.json`."""
    manifest: dict[str, Any]
    """`manifest.json`."""

    def column(self, key: str) -> list[float]:
        """The measured values of one key of the rows."""
        return [value for row in self.rows if (value := number(row, key)) is not None]

    def total(self, key: str) -> float | None:
        """A total from the summary; a run that still goes on, or was killed, has it in the last row only."""
        total = number(self.run, "summary", key)
        return total if total is not None or not self.rows else number(self.rows[-1], key)

    def step_ms(self) -> float | None:
        """The median over all steps."""
        step_ms, times_ms = number(self.run, "summary", "step_ms_median"), self.column("step_ms")
        return median(times_ms) if step_ms is None and times_ms else step_ms

    def peak_and_budget_mib(self) -> tuple[float | None, float | None]:
        """Peak private memory and its limit."""
        peak_bytes = self.total("peak_private_bytes")
        return None if peak_bytes is None else peak_bytes / MIB, number(self.run, "budget_mib")

    def similarity(self) -> tuple[float | None, float | None]:
        """Subject similarity of the base model and of the adapter."""
        return number(self.pictures, "similarity", "base"), number(self.pictures, "similarity", "adapter")


def read_inputs(run_dir: Path, bundle_dir: Path) -> ReportInputs:
    """Reads a run and its bundle; raises ValueError if there is no readable `run.json`, or one of another schema."""
    run = _read_json(run_dir / "run.json")
    if not run:
        raise ValueError(f"no readable run.json in {run_dir}: expected a folder that `pocketdit train` wrote")
    if run.get("schema") != RUN_SCHEMA:
        raise ValueError(
            f"{run_dir / 'run.json'} has schema {run.get('schema')!r}, expected {RUN_SCHEMA!r}: "
            "make the report with the version of pocketdit that trained the run"
        )
    return ReportInputs(
        run_dir=run_dir,
        bundle_dir=bundle_dir,
        run=run,
        rows=[row for row in read_metrics(run_dir) if number(row, "step") is not None],
        pictures=_read_json(run_dir / "pictures" / "pictures.json"),
        manifest=_read_json(bundle_dir / "manifest.json"),
    )


def lookup(data: Any, *keys: str) -> Any:
    """The value under nested keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def number(data: Any, *keys: str) -> float | None:
    """A finite number, or None: NaN, infinity, text and absence all count as not measured."""
    value = lookup(data, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def dicts(values: Any) -> list[dict[str, Any]]:
    """The dictionaries of a list; none if it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
