"""What was not measured: the projection onto the phone, and the facts of its profile."""

import itertools
import re
from typing import Any

from host.charts import escape
from host.emulator.device import UNITS
from host.emulator.report_words import device_title, seconds_text
from host.page import missing, pairs, section
from host.report_inputs import dicts, lookup, number


def _range_text(bounds: Any) -> str:
    low, high = number(bounds, "low"), number(bounds, "high")
    if low is None or high is None:
        return "—" if number({"": bounds}, "") is None else seconds_text(float(bounds))
    return seconds_text(low) if high - low <= 0.005 * high else f"{seconds_text(low)} to {seconds_text(high)}"


def projection_section(data: dict[str, Any]) -> str:
    """How long steps would take on the phone, with the assumptions."""
    heading, projection = f"Projected on the {device_title(data)}", data.get("projection")
    if not isinstance(projection, dict):
        return section("projection", heading, "", missing("No projection: there was nothing to project from."))
    rows = [
        ("A step, phone cool", _range_text(projection.get("step_seconds"))),
        ("A step, phone hot", _range_text(projection.get("sustained_step_seconds"))),
        ("of it computing, cool", _range_text(projection.get("compute_seconds"))),
        ("of it reading flash", _range_text(projection.get("flash_seconds"))),
    ]
    run = projection.get("run_seconds")
    if isinstance(run, dict):
        rows.append((f"A run of {number(run, 'steps') or 0:,.0f} steps", _range_text(run)))
    assumptions = projection.get("assumptions")
    listed = "".join(f"<li>{escape(each)}</li>" for each in assumptions) if isinstance(assumptions, list) else ""
    body = f'<div class="plate projected">{pairs(rows)}<h3>Assumptions</h3><ul class="points">{listed}</ul></div>'
    return section("projection", heading, "Arithmetic, not a measurement: nothing here ran on that phone.", body)


def device_section(data: dict[str, Any]) -> str:
    """Every fact of the profile with its kind and source."""
    device = data.get("device")
    facts = dicts(lookup(device, "facts"))
    if not facts:
        return section("device", "The device", "", missing("The profile lists no facts."))
    counts = {kind: sum(fact.get("kind") == kind for fact in facts) for kind in ("published", "measured", "estimated")}
    names = [str(core.get("name", "cores")) for core in dicts(lookup(device, "cores"))]
    body = ""
    for part, group in itertools.groupby(facts, key=lambda fact: _part(str(fact.get("key", "")), names)):
        lines = ""
        # What one source says in one go is one line.
        for (kind, source), same in itertools.groupby(group, key=lambda fact: (fact.get("kind"), fact.get("source"))):
            said = ", ".join(_saying(str(fact.get("key", "")), str(fact.get("text", ""))) for fact in same)
            badge = f'<span class="kind {escape(kind)}">{escape(kind)}</span>'
            lines += f"<li>{escape(said)}{badge}<small>{_linked(source)}</small></li>"
        body += f'<h3>{escape(part)}</h3><ul class="facts">{lines}</ul>'
    lead = (
        ", ".join(f"{count} {kind}" for kind, count in counts.items())
        + ". What is not found is estimated, and says how."
    )
    return section("device", f"The device: {device_title(data)}", lead, body)


def _part(key: str, core_names: list[str]) -> str:
    """The table a fact stands in: `cores[0].clock_ghz` belongs to the first core's name."""
    core = re.match(r"cores\[(\d+)\]", key)
    if core and int(core[1]) < len(core_names):
        return core_names[int(core[1])]
    table = re.sub(r"\[\d+\]", "", key.partition(".")[0])
    return {"compute": "Speed", "cores": "Cores"}.get(table, table.replace("_", " ").capitalize())


def _saying(key: str, text: str) -> str:
    """Name and value, as `read 2,100 MB/s`; a note is a sentence of its own."""
    name = re.sub(rf"({'|'.join(UNITS)}|_seconds_share)$", "", key.partition(".")[2])
    return f"{name} {text}".strip().replace("_", " ") if name else text


def _linked(text: object) -> str:
    """Escaped text whose web addresses are links."""
    return re.sub(
        r"https?://[^\s;,)]+", lambda found: f'<a href="{found[0]}" rel="noreferrer">{found[0]}</a>', escape(text)
    )
