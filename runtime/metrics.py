"""The step log of a run, one JSON object a line. Reads and writes `metrics.jsonl`."""

import contextlib
import json
from pathlib import Path
from typing import Any, TextIO

from runtime import atomic
from runtime.errors import StorageFullError

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends a row per step and pushes it to the system at once, so that a kill loses at most the running step."""

    def __init__(self, run_dir: Path, *, resume_step: int) -> None:
        """Opens the log and drops rows after `resume_step`: those steps are done again."""
        self._path = run_dir / FILE_NAME
        kept = [row for row in read_metrics(run_dir) if row["step"] <= resume_step]
        self.last: dict[str, Any] | None = kept[-1] if kept else None
        atomic.write_bytes(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._full = False

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row.

        Raises:
            StorageFullError: There is no space for it.
        """
        try:
            with atomic.storage_full(self._path):
                self._file.write(json.dumps(row, allow_nan=False) + "\n")
                self._file.flush()
        except StorageFullError:
            self._full = True
            raise

    def sync(self) -> None:
        """Forces the log to storage; called before a checkpoint is written, so the log is never behind one."""
        atomic.fsync(self._path)

    def close(self) -> None:
        """Closes the log; half a row that found no space is left to the next run, which cuts it off."""
        if self._full:
            with contextlib.suppress(OSError):
                self._file.close()
            return
        self.sync()
        self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's log; a last line cut off by a kill is left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
