"""What the reports of a run and of an emulation share: the frame of the page, its pieces and its style.

Reads values, writes HTML that needs nothing beside it: no script, and a content policy that forbids every request.
Commands: `pocketdit report RUN`, `pocketdit emulate BUNDLE`.
"""

import base64
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from host.charts import escape, format_amount
from runtime.memory import MIB

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MAX_EMBEDDED_BYTES = 400_000
MAX_EMBEDDED_SIDE = 640


class Markup(str):
    """HTML that is already safe; everything else is escaped."""


def document(*, title: str, kind: str, body: str, footer: str) -> str:
    """The whole page.

    Args:
        title: Of the browser's tab, plain text.
        kind: What the page is, e.g. `report`, plain text.
        body: HTML of the header and the sections.
        footer: Plain text.
    """
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} · PocketDiT {escape(kind)}</title><style>{STYLE}</style>"
    )
    body += f"<footer>{escape(footer)}</footer>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'


def section(name: str, heading: str, lead: str, body: str) -> str:
    """A section with its heading and a sentence of introduction, all but `body` plain text."""
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{lead}{body}</section>'


def plate(chart: str, *notes: str) -> str:
    """A chart on a card; the notes below it are plain text, empty ones are left out."""
    note = " ".join(note for note in notes if note)
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<div class="plate">{chart}{note}</div>'


def missing(what: str, command: str = "", folder: Path = Path()) -> str:
    """Says what is not there, and the command that makes it."""
    advice = f" Run <code>{escape(f'{command} {shlex.quote(str(folder))}')}</code>" if command else ""
    return f'<p class="missing">{escape(what)}{advice}</p>'


def meter(share: float, css: str) -> str:
    """A bar filled by `share`, 0 to 1."""
    return f'<span class="meter"><i class="{css}" style="width:{min(max(share, 0), 1):.1%}"></i></span>'


def tile(name: str, value: str, note: str, share: float | None = None, bad: bool = False) -> str:
    """A headline number; a unit after its last space is set smaller."""
    amount, space, unit = value.rpartition(" ")
    amount, unit = (amount, unit) if space and unit.isalpha() else (value, "")
    unit = f" <small>{escape(unit)}</small>" if unit else ""
    strong = f'<strong class="{"bad" if bad else "good"}">{escape(amount)}{unit}</strong>'
    bar = "" if share is None else meter(share, "over" if bad else "after")
    return f'<div class="tile"><p>{escape(name)}</p>{strong}<p>{escape(note)}</p>{bar}</div>'


def embedded_picture(
    folder: Path, name: object, alt: str, *, max_bytes: int = MAX_EMBEDDED_BYTES, max_side: int = MAX_EMBEDDED_SIDE
) -> str:
    """An `<img>` with its bytes inside, shrunk if large; a labelled gap where `folder` holds no such picture.

    Args:
        folder: The picture lies in it.
        name: Of the picture, relative to it.
        alt: What it shows, plain text.
        max_bytes: A larger file is shrunk.
        max_side: To this many pixels.
    """
    path = folder / str(name)
    gap = f'<div class="gap" role="img" aria-label="{escape(alt)}: missing">no picture</div>'
    if not path.resolve().is_relative_to(folder.resolve()):
        return gap
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as picture:
            kind = picture.format
            if len(content) > max_bytes:
                picture.thumbnail((max_side, max_side))
                shrunk, kind = io.BytesIO(), "JPEG"
                picture.convert("RGB").save(shrunk, kind, quality=88)
                content = shrunk.getvalue()
            width, height = picture.size
    except (OSError, ValueError, SyntaxError):  # Pillow raises any of these for a broken file
        return gap
    source = f"data:image/{str(kind).lower()};base64,{base64.b64encode(content).decode('ascii')}"
    return f'<img src="{source}" alt="{escape(alt)}" width="{width}" height="{height}">'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header row; cells are plain text unless they are `Markup`."""

    def row(cells: Sequence[str], tag: str) -> str:
        inner = (cell if isinstance(cell, Markup) else escape(cell) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in inner) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<table class="data"><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table>'


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values."""
    body = "".join(
        f"<tr><th>{escape(key)}</th><td>{value if isinstance(value, Markup) else escape(value)}</td></tr>"
        for key, value in rows
    )
    return f"<table><tbody>{body}</tbody></table>"


def details(name: str, note: str, values: Any) -> str:
    """A folded table of a nested dictionary."""
    return f"<details><summary>{escape(name)} <span>{escape(note)}</span></summary>{pairs(flat(values))}</details>"


def flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Rows of a nested dictionary, with dotted keys."""
    if isinstance(values, dict):
        return [row for key, value in values.items() for row in flat(value, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(values, list):
        return [(prefix, ", ".join(str(value) for value in values))]
    if values is None or isinstance(values, bool):
        return [(prefix, {None: "—", True: "yes", False: "no"}[values])]
    return [(prefix, f"{values:g}" if isinstance(values, float) else str(values))]


# Numbers as text; None was not measured.


def amount_text(value: float | None) -> str:
    """Three significant digits, or a whole number."""
    return "—" if value is None else format_amount(value)


def mib_text(value: float | None) -> str:
    """MiB."""
    return "—" if value is None else f"{value:,.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def size_text(num_bytes: float | None) -> str:
    """Bytes in the unit that suits them."""
    if num_bytes is None:
        return "—"
    scale, unit = next((each for each in ((1024**3, "GiB"), (MIB, "MiB")) if num_bytes >= each[0]), (1024, "KiB"))
    return f"{format_amount(num_bytes / scale)} {unit}"


def duration_text(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return "—"
    scale, unit = (1, "s") if seconds < 90 else (60, "min") if seconds < 5400 else (3600, "h")
    return f"{seconds / scale:.0f} {unit}" if unit == "s" else f"{seconds / scale:.1f} {unit}"


STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #ffffff; --ink: #1d1c1a; --soft: #66635d; --line: #e5e2dc;
  --bad: #b3311f; --fine: #1b7a43; --c1: #2f5fd0; --c2: #bd7410; --c3: #17806f; --c4: #8a63c9; --c5: #928e86; --on: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #141416; --card: #1c1c1f; --ink: #ecebe8; --soft: #a3a09a; --line: #313136; --bad: #ff8a75; --fine:
    #6fd694; --c1: #86a8ff; --c2: #f0b055; --c3: #55c9b4; --c4: #b898f0; --c5: #77746e; --on: #141416; }
}
* { box-sizing: border-box; margin: 0; }
body { background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%; font: 16px/1.55 system-ui,
  -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 56px 24px 72px; }
section { margin-top: 56px; }
h1 { font-size: clamp(28px, 4.5vw, 40px); line-height: 1.15; font-weight: 650; letter-spacing: -0.02em; margin: 8px 0
  16px; overflow-wrap: anywhere; text-wrap: balance; }
h2 { font-size: 22px; line-height: 1.3; font-weight: 650; letter-spacing: -0.01em; margin-bottom: 4px; }
h3 { font-size: 16px; font-weight: 600; margin: 28px 0 12px; overflow-wrap: anywhere; }
img { display: block; max-width: 100%; height: auto; border-radius: 8px; background: var(--line); }
header { display: flex; gap: 40px; align-items: center; justify-content: space-between; flex-wrap: wrap; }
header > div:first-child { flex: 1 1 400px; min-width: 0; }
.eyebrow { color: var(--soft); font-size: 14px; }
.verdict { font-size: 19px; line-height: 1.45; max-width: 36em; text-wrap: pretty; }
.hero { display: flex; gap: 8px; }
.hero figure { flex: 0 1 128px; }
.hero figcaption { font-size: 13px; text-align: center; margin-top: 4px; }
.hero img, .photo img, .pair img, .gap { width: 100%; aspect-ratio: 1; object-fit: cover; }
.hero .gap { width: 120px; max-width: 100%; }
.lead, figcaption, .note { color: var(--soft); font-size: 15px; max-width: 46em; text-wrap: pretty; }
.lead { margin-bottom: 20px; }
h2 + :not(.lead) { margin-top: 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 12px; margin-top: 40px; }
.tile, .plate, .pair { background: var(--card); border: 1px solid var(--line); border-radius: 12px; break-inside:
  avoid; }
.tile { padding: 16px 20px 18px; }
.tile p { color: var(--soft); font-size: 14px; line-height: 1.4; }
.tile strong { display: block; font-size: 28px; line-height: 1.3; font-weight: 650; letter-spacing: -0.02em; margin:
  2px 0; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile .bad { color: var(--bad); }
.tile small { font-size: 16px; font-weight: 500; letter-spacing: 0; }
.meter { display: block; height: 4px; border-radius: 2px; background: var(--line); margin-top: 8px; overflow: hidden;
  }
.meter i { display: block; height: 100%; background: var(--c5); border-radius: 2px; }
.meter .after { background: var(--c1); }
.meter .over { background: var(--bad); }
.photos { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 16px; }
.photo { break-inside: avoid; }
.photo figcaption { font-size: 13px; line-height: 1.4; margin-top: 6px; overflow-wrap: anywhere; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 16px; }
.pair { padding: 12px; }
.pair > div { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
.pair span { display: block; font-size: 13px; line-height: 1.4; color: var(--soft); }
.pair .when { font-weight: 600; margin-bottom: 6px; }
.pair .when.after { color: var(--c1); }
.pair .similarity { margin-top: 8px; font-variant-numeric: tabular-nums; }
.pair figcaption { font-size: 13px; margin-top: 8px; }
.gap { display: grid; place-items: center; border: 1px dashed var(--c5); border-radius: 8px; color: var(--soft);
  font-size: 13px; }
.tag { font-size: 12px; font-weight: 500; color: var(--soft); border: 1px solid var(--line); border-radius: 99px;
  padding: 2px 9px; margin-left: 8px; white-space: nowrap; }
.missing { border: 1px dashed var(--c5); border-radius: 12px; padding: 18px 20px; color: var(--soft); overflow-wrap:
  anywhere; }
.pairs + .missing, .photos + .pairs { margin-top: 20px; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; color: var(--ink); background:
  var(--card); border: 1px solid var(--line); border-radius: 5px; padding: 1px 6px; }
.plate { padding: 20px; }
.plate img { margin: 0 auto; }
.note { margin-top: 14px; font-size: 14px; }
.c1 { --c: var(--c1); }
.c2 { --c: var(--c2); }
.c3 { --c: var(--c3); }
.c4 { --c: var(--c4); }
.c5 { --c: var(--c5); }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart.narrow { display: none; }
.chart + .legend { margin-top: 24px; }
.bar + .legend { margin-top: 16px; }
.chart text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
.chart text.limit { fill: var(--bad); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
.chart text.on { fill: var(--on); font-weight: 600; }
.chart path { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round; }
.chart .grid { stroke: var(--line); }
.chart .axis { stroke: var(--c5); }
.chart path.limit { stroke: var(--bad); stroke-dasharray: 6 5; stroke-width: 1.5; }
.chart path.mark { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 3; }
.chart text.mark { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
.chart .band { fill: var(--c); fill-opacity: 0.13; }
.chart .line, .chart .area { stroke-width: 2; }
.chart .steps { stroke-width: 1.5; stroke-dasharray: 1 4; }
.chart .dots { stroke-width: 4; opacity: 0.3; }
.chart path.shade { stroke: none; fill: var(--c); opacity: 0.16; }
.chart .fill { fill: var(--c); }
.chart .hit { fill: transparent; }
.chart .hit:hover { fill: var(--ink); fill-opacity: 0.06; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 20px; margin-bottom: 14px; font-size:
  14px; color: var(--soft); font-variant-numeric: tabular-nums; }
.legend:last-child { margin-bottom: 0; }
.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; background: var(--c); margin-right: 8px;
  vertical-align: 4px; }
.key.dots { width: 7px; height: 7px; border-radius: 50%; opacity: 0.5; vertical-align: 1px; }
.key.band { opacity: 0.35; }
.key.area, .key.bar, .key.band { width: 11px; height: 11px; border-radius: 3px; vertical-align: -1px; }
.key.steps { background: repeating-linear-gradient(90deg, var(--c) 0 2px, transparent 2px 5px); }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; }
summary span { color: var(--soft); font-weight: 400; font-size: 14px; margin-left: 6px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; margin-bottom: 16px; }
th, td { text-align: left; vertical-align: top; padding: 6px 16px 6px 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { width: 36%; font-weight: 400; color: var(--soft); }
table.data { font-variant-numeric: tabular-nums; }
table.data th { width: auto; border-top: 0; font-size: 13px; vertical-align: bottom; }
table.data th, table.data td { overflow-wrap: break-word; }
table.data small { overflow-wrap: anywhere; }
table.data td:last-child, table.data th:last-child { padding-right: 0; }
td small { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; }
a { color: inherit; text-decoration-color: var(--c5); }
.badge { display: inline-block; border-radius: 99px; padding: 1px 12px; margin-right: 8px; font-size: 0.85em; font-weight:
  650; background: var(--fine); color: var(--page); white-space: nowrap; }
.badge.bad { background: var(--bad); }
.callout { border: 1px solid var(--bad); border-left-width: 5px; border-radius: 12px; padding: 14px 18px; margin-top: 20px;
  max-width: 50em; break-inside: avoid; }
.kind { font-size: 12px; font-weight: 500; border: 1px solid var(--line); border-radius: 99px; padding: 2px 9px;
  white-space: nowrap; color: var(--soft); }
.kind.estimated { border-style: dashed; border-color: var(--c5); }
.plate + table { margin-top: 20px; }
.projected { border: 2px dashed var(--c5); background: none; }
.facts { list-style: none; padding: 0; font-size: 14px; }
.facts li { border-top: 1px solid var(--line); padding: 8px 0; break-inside: avoid; }
.facts small { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
.facts .kind { margin-left: 8px; }
.points { padding-left: 20px; color: var(--soft); font-size: 14px; max-width: 52em; }
.points li { margin-top: 6px; overflow-wrap: anywhere; }
footer { margin-top: 56px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
@media screen and (max-width: 700px) {
  main { padding: 32px 16px 48px; }
  section { margin-top: 44px; }
  header { gap: 24px; }
  .verdict { font-size: 17px; }
  .tiles { grid-template-columns: 1fr 1fr; margin-top: 28px; }
  .tile { padding: 12px 14px 14px; }
  .tile strong { font-size: 22px; }
  .tile small, .tile p { font-size: 13px; }
  .photos { grid-template-columns: repeat(auto-fill, minmax(100px, 1fr)); gap: 12px; }
  .plate { padding: 16px 12px; }
  .chart.wide { display: none; }
  .chart.narrow { display: block; }
}
@media print {
  @page { margin: 14mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { background: none; font-size: 11pt; }
  main { max-width: none; padding: 0 1px; }
  section { margin-top: 28px; }
  h2, h3, .lead { break-after: avoid; break-inside: avoid; }
  .tiles { grid-template-columns: repeat(3, 1fr); }
  .photos { grid-template-columns: repeat(auto-fill, minmax(100px, 1fr)); }
  .pairs { grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); }
  details::details-content { content-visibility: visible; height: auto; }
}
"""
