"""What befalls a phone while it trains, and when: the schedule, and what each fault does.

A fault strikes right after a step has been reported; the process waits for its orders there, so the moment is exact. Some end
the process: the emulator starts it again, as the system starts an app again, and it goes on from its last checkpoint.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("kill", "low-memory", "disk-full", "slow-read", "failing-read", "thermal", "battery")
ORDERS: dict[str, dict[str, Any]] = {
    "low-memory": {"pause": True},
    "battery": {"pause": True},
    "disk-full": {"storage": "disk-full"},
    "failing-read": {"storage": "failing-read"},
}
"""What the process is told; the other faults are made from outside."""
ENDS_PROCESS = ("kill", "low-memory", "battery", "disk-full", "failing-read")
SLOW_SHARE = 0.1
"""Of the flash's bandwidth, while reads are slow."""
SLOW_SECONDS = 2.0


@dataclass(slots=True)
class Fault:
    """One fault of a run.

    Attributes:
        kind: One of `KINDS`.
        step: It strikes after this step, or the first one later that comes along.
        moment: Share of a step that passes before a kill.
        seconds: When it struck, since the start; None before.
        detail: What happened, one sentence.
        recovered: Whether training took another step afterwards.
    """

    kind: str
    step: int
    moment: float = 0.0
    seconds: float | None = None
    detail: str = field(default="did not strike")
    recovered: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As emulation.json has it."""
        names = ("kind", "seconds", "step", "detail", "recovered")
        return {name: getattr(self, name) for name in names}


def parse_kinds(text: str) -> tuple[str, ...]:
    """`kill,thermal` as a tuple.

    Raises:
        ValueError: A kind is unknown.
    """
    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--faults: got {', '.join(map(repr, unknown))}, expected some of {','.join(KINDS)}")
    return kinds


def schedule(kinds: Sequence[str], steps: int, draw: random.Random) -> list[Fault]:
    """Spreads faults over a run in the given order, each at a random step of its own part.

    Raises:
        ValueError: There are too few steps for each fault to have one before and one after it.
    """
    parts = len(kinds) + 1
    if kinds and steps < 2 * parts:
        raise ValueError(
            f"--faults: {len(kinds)} faults in {steps} steps, expected at least {2 * parts}. Raise --steps."
        )
    faults = []
    for number, kind in enumerate(kinds):
        first, end = max(1, number * steps // parts), (number + 1) * steps // parts
        faults.append(Fault(kind, draw.randint(first, max(first, end - 1)), draw.random()))
    return faults


def checkpoint_every(kinds: Sequence[str], steps: int, wanted: int) -> int:
    """Steps between checkpoints with which each fault has one before the next fault."""
    return min(wanted, max(1, steps // (len(kinds) + 1) // 2)) if kinds else wanted
