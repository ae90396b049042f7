"""The one-screen summary of an emulation, from the content of emulation.json."""

from typing import Any

from runtime.memory import MIB


def summary_text(made: dict[str, Any]) -> str:
    """What a person reads in the terminal."""
    enforcement, budget, peak, idle = made["enforcement"], made["budget"], made["peak"], made["idle"]
    flash, steps = made["flash"], made["summary"]
    weaker = " (weaker: a peak shorter than 20 ms passes unseen)" if enforcement["memory"] == "sampling" else ""
    limit = budget["kernel_limit_bytes"]
    lines = [
        f"{made['verdict'].upper()}: {made['reason']}",
        f"device    {made['device']['title']}",
        f"memory    {_mib(peak['private_bytes'])} private beyond idle at most, of {_mib(budget['private_bytes'])} "
        f"({budget['basis']}); in phase {peak['phase']}{_block(peak)}, step {peak['step']}",
        f"          {_mib(peak['total_private_bytes'])} with the idle process ({_mib(idle['private_bytes'])}), "
        f"{_mib(peak['kernel_anon_bytes'])} by the kernel; files {_mib(peak['file_bytes'])}, not gated",
        f"enforced  memory {enforcement['memory']}{weaker}, CPU {enforcement['cpu']}, flash {enforcement['flash']}; "
        + (f"the kernel's limit is {_mib(limit)}" if limit else "no limit of the kernel"),
    ]
    if breach := made["breach"]:
        lines.append(
            f"breach    {breach['seconds']:.2f} s, phase {breach['phase']}{_block(breach)}, step {breach['step']}, "
            f"by the {breach['by']}"
        )
    if "step_ms_median" in steps:
        split = {name: 0.0 for name in ("read", "forward", "backward", "optimizer", "other")}
        for row in made["steps"]:
            for name in split:
                split[name] += row[f"{name}_ms"] / len(made["steps"])
        parts = ", ".join(f"{name} {value:.0f}" for name, value in split.items())
        lines.append(f"steps     {steps['steps']}, {steps['step_ms_median']:.0f} ms each here ({parts})")
    if made["projection"]:
        cool, hot = made["projection"]["step_seconds"], made["projection"]["sustained_step_seconds"]
        lines.append(
            f"projected {cool['low']:.2g} to {cool['high']:.2g} s a step on the phone, "
            f"{hot['low']:.2g} to {hot['high']:.2g} s hot; not measured"
        )
    lines.append(
        f"flash     {_mib(flash['read_bytes'])} read, {_mib(flash['written_bytes'])} written "
        f"({flash['written_per_step_bytes'] / 1024:.0f} KiB a step)"
    )
    for fault in made["faults"]:
        mark = "recovered" if fault["recovered"] else "LOST"
        lines.append(f"fault     {fault['kind']} after step {fault['step']}: {fault['detail']}; {mark}")
    if made["adapter_equals_undisturbed"] is not None:
        same = (
            "equals the undisturbed one bit for bit, each loss too" if made["adapter_equals_undisturbed"] else "DIFFERS"
        )
        lines.append(f"adapter   {same}")
    lines += [f"note      {note}" for note in enforcement["notes"]]
    return "\n".join(lines)


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / MIB:.1f} MiB"


def _block(place: dict[str, Any]) -> str:
    return "" if place["block"] is None else f", block {place['block']}"
