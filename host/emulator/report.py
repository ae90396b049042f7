"""The report of an emulation: one `emulation.html` that needs nothing beside it.

Reads the content of `emulation.json` (schema in emulate.py), writes the page. What was measured and what is projected stand in
sections of their own. Command: `pocketdit emulate BUNDLE`.
"""

import shlex
from pathlib import Path
from typing import Any

from host.charts import escape, format_amount
from host.emulator.emulate import SCHEMA
from host.emulator.report_curves import flash_section, memory_section, time_section
from host.emulator.report_device import device_section, projection_section
from host.emulator.report_words import (
    budget_bytes,
    device_title,
    is_sampled,
    place_text,
    rate_text,
    size_at,
    yes_text,
)
from host.page import (
    MIB,
    Markup,
    details,
    document,
    duration_text,
    mib_text,
    missing,
    pairs,
    section,
    size_text,
    table,
    tile,
)
from host.report_inputs import dicts, lookup, number
from runtime import atomic

VERDICTS = {"within": "Within budget", "over": "Over budget", "killed": "Killed", "failed": "Failed"}
STRENGTH = {
    "memory": {
        "cgroup": "the kernel enforces the limit",
        "sampling": "weaker: looked at every 20 ms and killed when over; a shorter peak may pass unseen, and nothing is denied",
    },
    "cpu": {
        "cgroup": "the kernel enforces the quota",
        "none": "not limited: step times are this machine's",
    },
    "flash": {
        "blkio": "the kernel limits the bandwidth of the block device",
        "io.max": "the kernel limits the bandwidth of the block device",
        "throttled reader": "weaker: the reader waits to keep the bandwidth; page faults beside it are not slowed",
        "none": "not limited: reading is as fast as this machine's storage",
    },
}
"""What each way of enforcing is worth, by how its name starts; one that is not here is shown by its name alone."""


def write_report(emulation: dict[str, Any], path: Path) -> Path:
    """Writes the report of an emulation that kept within its budget, broke it, was killed or failed.

    Args:
        emulation: Content of `emulation.json`; what is missing becomes a note in the page.
        path: Where the page goes.

    Returns:
        The path of the page.

    Raises:
        ValueError: If it has another schema.
    """
    if emulation.get("schema") != SCHEMA:
        raise ValueError(f"emulation has schema {emulation.get('schema')!r}, expected {SCHEMA!r}")
    title = f"{Path(str(emulation.get('bundle', 'bundle'))).name} on {device_title(emulation)}"
    parts = (
        _tiles,
        _summary,
        memory_section,
        time_section,
        flash_section,
        _enforcement,
        _faults,
        projection_section,
        device_section,
        _details,
    )
    body = _header(emulation, title) + "".join(part(emulation) for part in parts)
    footer = (
        f"Made by PocketDiT {emulation.get('version', '')}, {str(emulation.get('date', ''))[:19].replace('T', ' ')}."
    )
    atomic.write_bytes(path, document(title=title, kind="emulation", body=body, footer=footer).encode())
    return path


# The page, from top to bottom.


def _header(data: dict[str, Any], title: str) -> str:
    verdict = str(data.get("verdict"))
    css = "badge" if verdict == "within" else "badge bad"
    badge = f'<span class="{css}">{escape(VERDICTS.get(verdict, verdict))}</span>'
    reason = escape(data.get("reason") or "No reason was given.")
    weaker = ""
    if is_sampled(data):
        what = "Memory was sampled, not limited by the kernel: a peak shorter than 20 ms may have passed unseen."
        weaker = f'<p class="callout"><strong>Weaker check.</strong> {what}</p>'
    breach, found = data.get("breach"), ""
    if isinstance(breach, dict):
        held = mib_text((number(breach, "private_bytes") or 0) / MIB)
        when = f"{format_amount(number(breach, 'seconds') or 0)} s"
        if breach.get("by") == "runtime":
            how = "the runtime itself stopped: its plan or its own measurement is above "
            how += f"{size_at(data, 'budget', 'private_bytes')}."
        elif breach.get("by") == "kernel":
            how = f"the kernel ended it at {held} private beyond idle, its limit for all memory is "
            how += f"{size_at(data, 'budget', 'kernel_limit_bytes')}."
        else:
            allowed = mib_text((budget_bytes(data) or 0) / MIB)
            how = f"{held} private beyond idle where {allowed} are allowed, seen by the sampler."
        found = (
            f'<p class="callout"><strong>Breach at {when}</strong> in {escape(place_text(breach))}: {escape(how)}</p>'
        )
    return (
        f'<header><div><p class="eyebrow">PocketDiT emulation</p><h1 dir="auto">{escape(title)}</h1>'
        f'<p class="verdict">{badge}{reason}</p>{found}{weaker}</div></header>'
    )


def _tiles(data: dict[str, Any]) -> str:
    peak, budget = number(data, "peak", "private_bytes"), budget_bytes(data)
    share = peak / budget if peak is not None and budget else None
    step_ms = number(data, "summary", "step_ms_median")
    steps = number(data, "summary", "steps") or len(dicts(data.get("steps")))
    memory = str(lookup(data, "enforcement", "memory") or "—")
    tiles = (
        tile(
            "Peak private memory",
            size_at(data, "peak", "private_bytes"),
            f"of {size_text(budget)}, beyond idle",
            share,
            share is not None and share > 1,
        ),
        tile("Idle interpreter", size_at(data, "idle", "private_bytes"), "private, measured in this run, apart"),
        tile(
            "Memory limit by",
            memory,
            "sampled, weaker" if is_sampled(data) else "enforced by the kernel",
            bad=is_sampled(data),
        ),
        tile(
            "Time per step here", "—" if step_ms is None else f"{format_amount(step_ms)} ms", f"median of {steps:,.0f}"
        ),
        tile("Read from flash", size_at(data, "flash", "read_bytes"), rate_text(number(data, "flash", "read_limit"))),
        tile(
            "Written to flash",
            size_at(data, "flash", "written_bytes"),
            f"{size_at(data, 'flash', 'written_per_step_bytes')} a step",
        ),
    )
    return f'<section id="numbers" aria-label="Headline numbers"><div class="tiles">{"".join(tiles)}</div></section>'


def _summary(data: dict[str, Any]) -> str:
    budget, peak = data.get("budget"), data.get("peak")
    sampled, kernel = number(peak, "total_private_bytes"), number(peak, "kernel_anon_bytes")
    agree = (
        "" if not sampled or kernel is None else f" ({abs(kernel - sampled) / sampled:.1%} apart from the sampled one)"
    )
    total = number(budget, "total_bytes")
    first, last = number(data, "summary", "first_loss"), number(data, "summary", "last_loss")
    planned, seconds, when = number(peak, "planned_private_bytes"), number(peak, "seconds"), ""
    if seconds is not None:
        when = f", at {format_amount(seconds)} s in {place_text(peak)}"
    rows = [
        ("Private memory, peak", f"{size_at(peak, 'private_bytes')} beyond idle{when}"),
        ("Budget", f"{size_at(budget, 'private_bytes')} beyond idle, from {lookup(budget, 'basis') or '—'}"),
        ("Budget in all", "none" if total is None else f"{size_text(total)}, interpreter included"),
        ("Planned", "—" if not planned else f"{size_text(planned)}, counted before the start"),
        (
            "Idle process",
            f"{size_at(data, 'idle', 'private_bytes')} private, {size_at(data, 'idle', 'file_bytes')} of files",
        ),
        ("Peak with the interpreter", f"{size_text(sampled)} sampled, {size_text(kernel)} by the kernel{agree}"),
        ("File-backed, peak", f"{size_at(peak, 'file_bytes')}: reported, not held against the budget"),
        ("Kernel", _kernel_text(data.get("kernel"))),
        ("Loss", "—" if first is None or last is None else f"{first:.4g} at the start, {last:.4g} at the end"),
        ("Time", duration_text(number(data, "summary", "seconds"))),
        ("Exit status", str(data.get("exit_status", "—"))),
    ]
    return section("summary", "Summary", "Everything in this section was measured in this run.", pairs(rows))


def _kernel_text(kernel: Any) -> str:
    kills, hits, throttled = (number(kernel, key) for key in ("oom_kills", "limit_hits", "throttled_seconds"))
    words = ["kills are not counted" if kills is None else f"{kills:.0f} out-of-memory kill{'' if kills == 1 else 's'}"]
    words.append("" if hits is None else f"limit hit {hits:,.0f} times")
    words.append("" if throttled is None else f"CPU held back for {duration_text(throttled)}")
    return ", ".join(word for word in words if word)


# What the figures are worth.


def _enforcement(data: dict[str, Any]) -> str:
    used, budget = data.get("enforcement"), data.get("budget")
    cores = number(used, "cpu_cores")
    limits = {
        "memory": f"{size_at(budget, 'kernel_limit_bytes')} with idle share and page cache"
        if number(budget, "kernel_limit_bytes") is not None
        else "—",
        "cpu": ("—" if lookup(used, "cpu") in (None, "none") else "see the notes")
        if cores is None
        else f"the time of {cores:.3g} core{'' if cores == 1 else 's'}",
        "flash": ", ".join(f"{way} {rate_text(number(data, 'flash', f'{way}_limit'))}" for way in ("read", "write")),
    }
    rows = []
    for what, name in (("memory", "Memory"), ("cpu", "CPU"), ("flash", "Flash")):
        way = str(lookup(used, what) or "none")
        worth = next((worth for start, worth in STRENGTH[what].items() if way.startswith(start)), "")
        rows.append((name, Markup(f"{escape(way)}<small>{escape(worth)}</small>"), limits[what]))
    locked, swap = number(used, "locked_bytes"), number(used, "swap_bytes")
    facts = [
        ("Gate", "private memory beyond idle of every process of the tree, sampled every 20 ms"),
        ("Page cache allowed", size_at(budget, "page_cache_bytes")),
        ("Page cache dropped first", yes_text(lookup(used, "page_cache_dropped"))),
        ("Locked pages", "none" if locked == 0 else size_text(locked)),
        ("Swap used", "none" if swap == 0 else size_text(swap)),
    ]
    notes = lookup(used, "notes")
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes) if isinstance(notes, list) else ""
    weak = f'<h3>What is weaker or differs, and why</h3><ul class="points">{listed}</ul>' if listed else ""
    body = table(("limit", "enforced by", "set to"), rows) + pairs(facts) + weak
    return section("enforcement", "How the limits were enforced", "", body)


def _faults(data: dict[str, Any]) -> str:
    faults = dicts(data.get("faults"))
    heading = "Faults injected"
    if not faults:
        return section("faults", heading, "", missing("None was asked for."))
    rows = []
    for fault in faults:
        done = fault.get("recovered") is True
        badge = Markup(f'<span class="badge{"" if done else " bad"}">{"recovered" if done else "not recovered"}</span>')
        what = Markup(f"{escape(fault.get('kind', ''))}<small>{escape(fault.get('detail', ''))}</small>")
        seconds, step = number(fault, "seconds"), number(fault, "step")
        when = "—" if seconds is None else f"{format_amount(seconds)}\u00a0s"
        rows.append((what, when, "—" if step is None else f"{step:.0f}", badge))
    same = data.get("adapter_equals_undisturbed")
    lead = "The adapter was not compared with one of an undisturbed run."
    if isinstance(same, bool):
        same_text = "equals bit for bit" if same else "differs from"
        lead = f"The adapter {same_text} the one of an undisturbed run."
    body = table(("fault", "at", "step", "afterwards"), rows)
    return section("faults", heading, lead, body)


def _details(data: dict[str, Any]) -> str:
    command = data.get("command")
    line = shlex.join(str(word) for word in command) if isinstance(command, list) else str(command or "—")
    run = {"bundle": data.get("bundle"), "command": line, "version": data.get("version"), "date": data.get("date")}
    groups = (
        ("Run", "", run),
        ("Budget", "in bytes", data.get("budget")),
        ("Enforcement", "", data.get("enforcement")),
    )
    return section(
        "details", "Details", "", "".join(details(name, note, values) for name, note, values in groups if values)
    )
