"""What an emulation has seen: samples of memory, peaks, steps, flash traffic. Filled by emulate.py, becomes emulation.json."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from host.emulator.cgroups import Counters
from host.emulator.observe import Memory
from host.emulator.status import PHASES, Place

MOST_SAMPLES = 2000

Row = tuple[float, int, int, int | None, int, int, int]
"""Seconds, private bytes beyond idle, file-backed bytes, the kernel's anonymous bytes, phase id, block or -1, step."""


@dataclass(slots=True)
class Recorder:
    """Sums over all processes of an emulation, one after the other."""

    samples: list[Row] = field(default_factory=list)
    peak: dict[str, Any] = field(default_factory=dict)
    idle: Memory = field(default=Memory(0, 0, 0, 0))
    idle_kernel_bytes: int | None = None
    most_file_bytes: int = 0
    most_kernel_bytes: int | None = None
    most_total_bytes: int = 0
    locked_bytes: int = 0
    swap_bytes: int = 0
    planned_private_bytes: int = 0
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    cpu_seconds: list[float] = field(default_factory=list)
    writes: dict[str, int] = field(default_factory=lambda: {"checkpoints": 0, "adapter": 0})
    _writing: tuple[int, str, int] = (0, "", 0)
    """Process, phase it writes in, and what it had written before."""
    _traffic: dict[int, tuple[int, int]] = field(default_factory=dict)
    _streamed: int = 0
    _flash: int = 0
    _cpu: float = 0.0

    def start_process(self, idle: Memory, kernel_bytes: int | None) -> None:
        """A process is about to begin; `idle` is what it holds by then."""
        self.idle, self.idle_kernel_bytes = idle, kernel_bytes
        self._cpu = 0.0

    def sample(self, seconds: float, memory: Memory, kernel: Counters, place: Place) -> int:
        """Takes a sample and returns the private bytes beyond idle."""
        private = max(0, memory.private_bytes - self.idle.private_bytes)
        block = -1 if place.block is None else place.block
        self.samples.append(
            (
                round(seconds, 3),
                private,
                memory.file_bytes,
                kernel.anon_bytes,
                PHASES.index(place.phase),
                block,
                place.step,
            )
        )
        if not self.peak or private > self.peak["private_bytes"]:
            self.peak = {"private_bytes": private, "seconds": seconds, **place_fields(place)}
        self.most_total_bytes = max(self.most_total_bytes, memory.private_bytes)
        self.most_file_bytes = max(self.most_file_bytes, memory.file_bytes)
        self.locked_bytes = max(self.locked_bytes, memory.locked_bytes)
        self.swap_bytes = max(self.swap_bytes, memory.swap_bytes)
        if kernel.anon_bytes is not None:
            self.most_kernel_bytes = max(self.most_kernel_bytes or 0, kernel.anon_bytes)
        if len(self.samples) > 8 * MOST_SAMPLES:
            self.samples = thinned(self.samples, 4 * MOST_SAMPLES)
        return private

    def traffic(self, pid: int, read: int, written: int) -> None:
        """Flash bytes of a process so far; figures only grow, and stay when it ends."""
        before = self._traffic.get(pid, (0, 0))
        self._traffic[pid] = (max(before[0], read), max(before[1], written))

    def writing(self, pid: int, phase: str, written: int) -> None:
        """A process begins to write for `phase`, with so much written so far; empty when it is through with that.

        One that is gone without a word wrote for the last phase until its end.
        """
        _, before_phase, before = self._writing
        if before_phase:
            name = "checkpoints" if before_phase == "checkpoint" else before_phase
            self.writes[name] += written - before
        self._writing = (pid, phase, written)
        self.traffic(pid, 0, written)

    def end_process(self) -> None:
        """The process is gone, its traffic all counted."""
        pid, _, before = self._writing
        self.writing(pid, "", self._traffic.get(pid, (0, before))[1])

    def step(self, seconds: float, row: dict[str, Any], cpu_seconds: float) -> None:
        """Takes a row of the step log; a step that is done again replaces the one before."""
        names = ("step", "step_ms", "read_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms", "loss")
        # The log's totals go on over a restart from where the checkpoint was, so a step's own share may look negative.
        streamed, flash = row["streamed_bytes"] - self._streamed, row["flash_read_bytes"] - self._flash
        if streamed < 0:
            streamed, flash = self.steps.get(row["step"], {}).get("streamed_bytes", 0), 0
        self.steps[row["step"]] = {
            **{name: row[name] for name in names},
            "streamed_bytes": streamed,
            "flash_read_bytes": max(0, flash),
            "seconds": round(seconds, 3),
        }
        self._streamed, self._flash = row["streamed_bytes"], row["flash_read_bytes"]
        if self._cpu:
            self.cpu_seconds.append(cpu_seconds - self._cpu)
        self._cpu = cpu_seconds

    def flash_bytes(self) -> tuple[int, int]:
        """Bytes read and written by all processes."""
        return sum(read for read, _ in self._traffic.values()), sum(written for _, written in self._traffic.values())


def place_fields(place: Place) -> dict[str, Any]:
    """A place as emulation.json has it."""
    return {"phase": place.phase, "block": place.block, "step": place.step}


def thinned(samples: Sequence[Row], most: int = MOST_SAMPLES) -> list[Row]:
    """At most so many samples, of each stretch the one with most private memory."""
    if len(samples) <= most:
        return list(samples)
    bounds = [len(samples) * number // most for number in range(most + 1)]
    return [max(samples[start:end], key=lambda row: row[1]) for start, end in itertools.pairwise(bounds)]
