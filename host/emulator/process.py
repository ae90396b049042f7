"""What runs inside the limits: `python -m host.emulator.process SPEC`, with SPEC as JSON; started by emulate.py.

Speaks lines of JSON: says `idle` when all is imported, waits for `go`, then reports `start`, `writes`, `step` and `end` or
`error`. Ends itself when the emulator is gone. The workload is a module with `run(job)`; the product's is training.py.
"""

import importlib
import json
import os
import queue
import sys
import threading
import time
from typing import Any

from host.emulator.observe import flash_bytes
from host.emulator.status import StatusPage

WRITING = ("checkpoint", "adapter")
"""Phases whose writes to flash are counted apart; the rest is the step log and `run.json`."""
ORPHANED = 113
"""Exit status when the emulator is gone."""


class Job:
    """What a workload gets.

    Attributes:
        spec: What the emulator asked for: bundle, run_dir, steps and so on.
        budget_mib: Private memory beyond idle, whole MiB; None without a limit.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Opens the lines to the emulator; what libraries print goes to stderr instead."""
        self.spec = spec
        self.budget_mib: int | None = None
        self._status = StatusPage(spec["status_descriptor"])
        self._writing = ""
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, **values: Any) -> None:
        """Reports to the emulator."""
        self._out.write(json.dumps({"event": event, **values}) + "\n")
        self._out.flush()

    def order(self) -> dict[str, Any]:
        """The emulator's next order; waits for it."""
        return self._orders.get()

    def at(self, phase: str, step: int, block: int | None) -> None:
        """Says where this process is, and what it had written to flash when a phase that writes begins or ends."""
        self._report_writes(phase)
        self._status.write(phase, step, block)

    def _report_writes(self, phase: str) -> None:
        """Says where writing for one thing ends and for another begins; at once, since the process may be killed."""
        writing = phase if phase in WRITING else ""
        if writing != self._writing:
            self._writing = writing
            self.send("writes", phase=writing, written_bytes=flash_bytes(os.getpid())[1])

    def _listen(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        os._exit(ORPHANED)


def main() -> int:
    """Runs one workload; the exit status is 0 if it came to its end, 1 if it raised."""
    spec = json.loads(sys.argv[1])
    if spec["cores"]:
        os.sched_setaffinity(0, spec["cores"])  # before the libraries count them
    job = Job(spec)
    workload = importlib.import_module(spec["workload"])
    job.at("idle", 0, None)
    job.send("idle")
    job.budget_mib = job.order()["budget_mib"]
    try:
        result = workload.run(job)
    except Exception as error:
        refused = isinstance(error, ValueError | FileNotFoundError)
        job.send(
            "error", kind=type(error).__name__, message=str(error), refused=refused, cpu_seconds=time.process_time()
        )
        return 1
    job.send("end", **result, cpu_seconds=time.process_time())
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # taking the libraries down would be two seconds more of a process that has done its work
