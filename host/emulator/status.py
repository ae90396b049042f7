"""Where the emulated process is: one page of memory it shares with the emulator. Written at each phase change, read at each
sample; it is an anonymous file, so it costs no flash.
"""

import mmap
import os
import struct
from dataclasses import dataclass

PHASES = ("idle", "load", "read", "forward", "loss", "backward", "optimizer", "checkpoint", "adapter", "other")
"""Names of `runtime.trainer.PhaseCallback`, by id; before them the idle process, after them a workload's own."""
_FORMAT = struct.Struct("=qqq")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is."""

    phase: str
    step: int
    block: int | None

    def __str__(self) -> str:
        """For a sentence."""
        block = "" if self.block is None else f", block {self.block}"
        return f"phase {self.phase!r}{block}" + (f", step {self.step}" if self.step else "")


class StatusPage:
    """The shared page."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes a page, or opens the one that `descriptor` stands for."""
        if descriptor is None:
            descriptor = os.memfd_create("pocketdit-status", 0)
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)

    def write(self, phase: str, step: int, block: int | None) -> None:
        """Says where this process is now; an unknown phase is `other`."""
        number = PHASES.index(phase if phase in PHASES else "other")
        self._map[: _FORMAT.size] = _FORMAT.pack(number, step, -1 if block is None else block)

    def read(self) -> Place:
        """Where the process is now."""
        number, step, block = _FORMAT.unpack(self._map[: _FORMAT.size])
        return Place(PHASES[number], step, None if block < 0 else block)

    def close(self) -> None:
        """Gives the page back."""
        self._map.close()
        os.close(self.descriptor)
