"""What changes over the run, drawn: memory over time, the parts of each step, the bytes it streamed."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from host.charts import Band, Limit, Mark, Series, format_amount, line_chart, stacked_bar, stacked_columns
from host.emulator.report_words import budget_bytes, place_text, rate_text, size_at, yes_text
from host.page import MIB, Markup, meter, mib_text, missing, pairs, plate, section, size_text, table
from host.report_inputs import dicts, lookup, number

STEP_PHASES = ("read", "forward", "backward", "loss", "optimizer")
STEP_PARTS = (("read", "c2"), ("forward", "c1"), ("backward", "c4"), ("optimizer", "c3"), ("other", "c5"))
PHASE_COLORS = {"load": "c4", "checkpoint": "c2", "adapter": "c3"}
MAX_SHADED_STEPS = 60
NO_PROCESS = "no process"


Row = tuple[float, float | None, float | None, float | None, str, int, int]
"""(seconds, private MiB, file MiB, kernel MiB beyond idle, phase, block, step)."""


def _samples(data: dict[str, Any]) -> list[Row]:
    phases, idle_bytes = data.get("phases") or [], number(data, "idle", "kernel_anon_bytes")
    idle = (number(data, "idle", "private_bytes") or 0 if idle_bytes is None else idle_bytes) / MIB
    rows: list[Row] = []
    for row in data.get("samples") or []:
        seconds, private, file, kernel = (number({"": value}, "") for value in row[:4])
        phase, block, step = (int(number({"": value}, "") or 0) for value in row[4:7])
        if seconds is None:
            continue
        private, file, kernel = (None if value is None else value / MIB for value in (private, file, kernel))
        beyond = None if kernel is None else max(0.0, kernel - idle)
        name = str(phases[phase]) if 0 <= phase < len(phases) else "unknown"
        rows.append((seconds, private, file, beyond, name, block, step))
    return _with_pauses(rows)


def _with_pauses(rows: list[Row]) -> list[Row]:
    """Ends the curves where no process was there, as between a kill and the next start."""
    apart = [later[0] - earlier[0] for earlier, later in itertools.pairwise(rows)]
    longest = max(1.0, 20 * median(apart)) if apart else 1.0
    made: list[Row] = []
    for row, pause in zip(rows, [*apart, 0.0][: len(rows)], strict=True):
        made.append(row)
        if pause > longest:
            made.append((row[0], None, None, None, NO_PROCESS, -1, 0))
    return made


def memory_section(data: dict[str, Any]) -> str:
    """Private and file-backed memory over time, and the highest by phase."""
    heading, samples, budget = "Memory over time", _samples(data), budget_bytes(data)
    if not any(row[1] is not None for row in samples):
        return section(
            "memory", heading, "", missing("No memory was sampled: the process ended before the first sample.")
        )
    limit = None if budget is None else Limit(value=budget / MIB, label=f"budget {mib_text(budget / MIB)}")
    bands, marks = _bands(samples), _marks(data)
    private = [Series(label="private beyond idle", points=[row[:2] for row in samples], style="area", color="c1")]
    if any(row[3] is not None for row in samples):
        points = [(row[0], row[3]) for row in samples]
        private.append(Series(label="the kernel's figure, less idle", points=points, style="steps", color="c4"))
    title = "Private memory beyond idle over time against the budget"
    chart = line_chart(
        private, title=title, x_label="time (s)", y_label="private memory (MiB)", limit=limit, bands=bands, marks=marks
    )
    mapped = [Series(label="file-backed", points=[(row[0], row[2]) for row in samples], style="area", color="c3")]
    if any(row[2] is not None for row in samples):
        unnamed = [replace(mark, label="") for mark in marks]
        title, y_label = "File-backed memory over time", "file-backed memory (MiB)"
        chart += line_chart(
            mapped, title=title, x_label="time (s)", y_label=y_label, height=200, bands=bands, marks=unnamed
        )
    lead = "The budget limits private memory: what the system gets back only by killing the app. File-backed memory is mapped "
    lead += "weights and libraries, which it may drop and read again."
    pause = "Where the curves are broken no process was there." if any(row[4] == NO_PROCESS for row in samples) else ""
    idle = f"The idle process holds {size_at(data, 'idle', 'private_bytes')} of private memory, left out of this chart."
    return section("memory", heading, lead, plate(chart, idle, pause) + _by_phase(samples, budget))


def _bands(samples: Sequence[tuple[Any, ...]]) -> list[Band]:
    """Loading, checkpoints and the adapter in their colours; every other step in grey, unless there are too many."""
    num_steps = len({row[6] for row in samples})
    ends = [*(row[0] for row in samples[1:]), samples[-1][0]]
    bands = []
    for (is_step, name, step), rows in itertools.groupby(
        zip(samples, ends, strict=True),
        key=lambda pair: (pair[0][4] in STEP_PHASES, "" if pair[0][4] in STEP_PHASES else pair[0][4], pair[0][6]),
    ):
        stretch = list(rows)
        start, end = stretch[0][0][0], stretch[-1][1]
        if name == NO_PROCESS:
            continue
        if not is_step:
            bands.append(Band(start=start, end=end, label=name, group=name, color=PHASE_COLORS.get(name, "c5")))
        elif step % 2 == 0 and num_steps <= MAX_SHADED_STEPS:
            bands.append(Band(start=start, end=end, label=f"step {step}", group="every other step", color="c5"))
    return bands


def _marks(data: dict[str, Any]) -> list[Mark]:
    marks = []
    for fault in dicts(data.get("faults")):
        seconds = number(fault, "seconds")
        if seconds is not None:
            marks.append(Mark(x=seconds, label=str(fault.get("kind", "fault"))))
    seconds = number(data, "breach", "seconds")
    return marks if seconds is None else [*marks, Mark(x=seconds, label="breach", bad=True)]


def _by_phase(samples: Sequence[tuple[Any, ...]], budget: float | None) -> str:
    rows = []
    for name in dict.fromkeys(row[4] for row in samples):
        known = [row for row in samples if row[4] == name and row[1] is not None]
        if known:
            top = max(known, key=lambda row: row[1])
            moment = {"phase": name, "block": top[5], "step": top[6]}
            bar = "" if not budget else meter(top[1] * MIB / budget, "over" if top[1] * MIB > budget else "after")
            rows.append(
                (name, Markup(f"{mib_text(top[1])}{bar}"), f"{place_text(moment)}, at {format_amount(top[0])} s")
            )
    return "<h3>Highest by phase</h3>" + table(("phase", "private beyond idle", "where"), rows)


def time_section(data: dict[str, Any]) -> str:
    """Each step's time by part, and the mean."""
    heading = "Where a step's time goes"
    rows = [row for row in dicts(data.get("steps")) if number(row, "step") is not None and number(row, "step_ms")]
    if not rows:
        return section("time", heading, "", missing("No step was finished."))
    columns = []
    for row in rows:
        known = [number(row, f"{name}_ms") or 0.0 for name, _ in STEP_PARTS[:-1]]
        other = number(row, "other_ms")
        rest = (number(row, "step_ms") or 0.0) - sum(known)
        columns.append((number(row, "step") or 0.0, [*known, max(0.0, rest if other is None else other)]))
    means = [fmean(values) for values in zip(*(values for _, values in columns), strict=True)]
    bar_parts = [(name, mean, color) for (name, color), mean in zip(STEP_PARTS, means, strict=True) if mean > 0]
    chart = stacked_columns(
        columns, STEP_PARTS, title="Time of each step by part", x_label="step", y_label="time of a step (ms)"
    )
    if bar_parts:
        title = "Mean time of a step by part, in milliseconds"
        chart += f"<h3>On the mean</h3>{stacked_bar(bar_parts, title=title, unit='ms')}"
    lead = "Measured on this machine under the limits below. Backward includes computing each block again."
    return section("time", heading, lead, plate(chart))


def flash_section(data: dict[str, Any]) -> str:
    """What was read and written, and where each step's bytes came from."""
    flash = data.get("flash")
    latency, latency_text = number(flash, "latency_us"), "—"
    if latency is not None:
        imposed = lookup(data, "enforcement", "flash") == "throttled reader"
        latency_text = (
            f"{format_amount(latency)} µs on the phone, {'imposed on' if imposed else 'not imposed on'} each read"
        )
    in_steps = [number(row, "flash_read_bytes") for row in dicts(data.get("steps"))]
    before = max(0.0, (number(flash, "read_bytes") or 0.0) - sum(value or 0.0 for value in in_steps))
    writes = lookup(flash, "writes")
    split = ", ".join(f"{name} {size_text(number(writes, name))}" for name in writes or {})
    steps = number(data, "summary", "steps")
    rows = [
        ("Read", f"{size_at(flash, 'read_bytes')} in all, limited to {rate_text(number(flash, 'read_limit'))}"),
        ("of it outside of the steps", f"{size_text(before)}: loading reads the bundle once to check its hashes"),
        ("Written", f"{size_at(flash, 'written_bytes')} in all, limited to {rate_text(number(flash, 'write_limit'))}"),
        ("Written a step", f"{size_at(flash, 'written_per_step_bytes')}, on the mean of {steps or 0:,.0f} steps"),
        ("Written by what", split or "—"),
        ("Latency of a read", latency_text),
        ("Page cache dropped first", yes_text(lookup(data, "enforcement", "page_cache_dropped"))),
    ]
    columns = []
    for row in dicts(data.get("steps")):
        step, streamed, read = (number(row, key) for key in ("step", "streamed_bytes", "flash_read_bytes"))
        if step is not None and streamed is not None and read is not None:
            columns.append((step, [read / MIB, max(0.0, streamed - read) / MIB]))
    chart = ""
    if columns:
        parts = (("read from flash", "c2"), ("found in the page cache", "c3"))
        title, y_label = "Bytes streamed in each step by where they came from", "streamed in a step (MiB)"
        chart = plate(stacked_columns(columns, parts, title=title, x_label="step", y_label=y_label, height=200))
    lead = "Weights are read from flash again and again, which costs time; only writing wears flash out."
    return section("flash", "Flash", lead, chart + pairs(rows))
