"""How the report of an emulation says things: sizes, rates, places; None is a dash."""

from typing import Any

from host.charts import format_amount
from host.page import duration_text, size_text
from host.report_inputs import lookup, number

STANDING = ("load", "checkpoint", "adapter")
"""Phases outside of the steps."""


def device_title(emulation: dict[str, Any]) -> str:
    """The phone's name."""
    return str(lookup(emulation, "device", "title") or lookup(emulation, "device", "name") or "an unnamed device")


def size_at(data: Any, *keys: str) -> str:
    """Bytes under nested keys, in the unit that suits them."""
    return size_text(number(data, *keys))


def is_sampled(emulation: dict[str, Any]) -> bool:
    """Whether memory was looked at instead of limited."""
    return lookup(emulation, "enforcement", "memory") == "sampling"


def place_text(moment: Any) -> str:
    """`backward of block 7, step 3` as far as it is known."""
    phase, block, step = lookup(moment, "phase"), number(moment, "block"), number(moment, "step")
    words = str(phase or "an unknown phase") + ("" if block is None or block < 0 else f" of block {block:.0f}")
    return words + (f", step {step:.0f}" if step and phase not in STANDING else "")


def budget_bytes(data: dict[str, Any]) -> float | None:
    """Private memory allowed beyond idle."""
    return number(data, "budget", "private_bytes")


def yes_text(value: Any) -> str:
    """Yes, no, or not known."""
    return {True: "yes", False: "no"}.get(value, "—") if isinstance(value, bool) else "—"


def rate_text(value: float | None) -> str:
    """Bytes per second as vendors count."""
    return "no limit" if value is None else f"{format_amount(value / 1e6)} MB/s"


def seconds_text(value: float) -> str:
    """Seconds with three digits; minutes or hours when long."""
    return "none" if value == 0 else duration_text(value) if value >= 90 else f"{format_amount(value)} s"
