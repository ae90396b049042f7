"""Charts and style of the report: reads numbers, writes inline SVG and CSS for `host/report.py`.

No dependency and no script: values on hover are SVG `<title>` elements. Each chart is drawn twice, for wide and for
narrow screens, because text inside a scaled SVG shrinks with it; the style sheet shows one of the two.
Command: `pocketdit report RUN`.
"""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTHS = ((920, "wide"), (380, "narrow"))
MAX_DRAWN_POINTS = 800
MAX_HOVER_COLUMNS = 60
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 30, 46
TEXT_WIDTH = 7.2  # pixels of one 13 px character, rounded up: SVG cannot measure text


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve of a chart."""

    label: str
    """Name in the legend and in the hover text."""
    points: Sequence[tuple[float, float | None]]
    """(x, y) in order of x; a y of None leaves a gap."""
    style: Literal["dots", "line", "area", "steps"]
    """Light dots, a line, a line with its area shaded, or a thin dashed line."""
    color: str
    """Colour class of the style sheet: c1 to c5."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A labelled horizontal line, such as the memory budget."""

    value: float
    """Height of the line, in the unit of the y axis."""
    label: str
    """Text above the line."""


def escape(text: object) -> str:
    """Escapes any value for HTML text or a quoted attribute; a lone surrogate, legal in JSON, becomes `?`."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Ticks at steps of 1, 2 or 5 times a power of ten that cover `low` to `high`, about `count` of them."""
    span = high - low if high > low else abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    step = magnitude * next(factor for factor in (1, 2, 5, 10) if factor * magnitude >= span / count * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(max(high, low + span) / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def format_tick(value: float, step: float) -> str:
    """Writes a tick with just the decimals that its step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.3g}" if decimals > 6 else f"{value:,.{decimals}f}"


def moving_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Centred mean over `window` values, fewer at both ends; gaps are left out of the mean and stay gaps."""
    half = window // 2
    means: list[float | None] = []
    for index, value in enumerate(values):
        near = [other for other in values[max(0, index - half) : index + half + 1] if other is not None]
        means.append(None if value is None else sum(near) / len(near))
    return means


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    height: int = 280,
    limit: Limit | None = None,
    y_low: float = 0.0,
    y_cap: float | None = None,
) -> str:
    """Draws curves over a shared x axis that starts at 0.

    Args:
        series: Curves, the first at the back; at least one value must be there.
        title: Alternative text for those who cannot see the chart.
        x_label: Quantity and unit below the x axis.
        y_label: Quantity and unit above the y axis.
        height: Height in pixels at full width.
        limit: Horizontal line that the y axis always includes.
        y_low: Where the y axis starts.
        y_cap: Values above it are drawn at it, so that one spike does not flatten the rest.

    Returns:
        A legend and two `<svg>` elements, wide and narrow.
    """
    values = [y for each in series for _, y in each.points if y is not None]
    assert values, "a chart needs at least one value"
    y_high = max(y_low, min(max(values), math.inf if y_cap is None else y_cap))
    if limit is not None:
        y_high = max(y_high, limit.value * 1.12)  # room for the label
    y_high += 0.03 * (y_high - y_low) if y_high > y_low else abs(y_high) or 1.0
    y_ticks = [tick for tick in nice_ticks(y_low, y_high, height // 40) if tick <= y_high]
    x_high = max(max(x for each in series for x, _ in each.points), 0.0) or 1.0
    drawn = []
    for width, css in WIDTHS:
        frame = _Frame(width=width, height=height, x_high=x_high, y_high=y_high, y_ticks=y_ticks)
        shapes = frame.axes(x_label, y_label)
        for each in series:
            shapes += _curve(each, frame)
        if limit is not None:
            y = frame.y(limit.value)
            shapes.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{frame.right}"/>')
            shapes.append(
                f'<text class="limit" x="{frame.right}" y="{y - 6:.1f}" text-anchor="end">{escape(limit.label)}</text>'
            )
        drawn.append(_svg(width, height, css, title, shapes + _hover(series, x_label, frame)))
    return _legend([(each.label, each.color, each.style) for each in series]) + "".join(drawn)


def stacked_bar(parts: Sequence[tuple[str, float, str]], *, title: str, unit: str) -> str:
    """Draws one horizontal bar of (label, value, colour class) parts and a legend with each value and its share."""
    total = sum(value for _, value, _ in parts)
    labels = [
        (f"{name} {format_amount(value)} {unit} · {value / total:.0%}", color, "bar") for name, value, color in parts
    ]
    drawn = []
    for width, css in WIDTHS:
        x, shapes = 0.0, []
        for name, value, color in parts:
            side, text = value / total * width, f"{name} {format_amount(value)}"
            tip = escape(f"{text} {unit}, {value / total:.1%} of the step")
            shapes.append(
                f'<rect class="fill {color}" x="{x:.1f}" y="0" width="{max(side - 2, 0.5):.1f}" height="52" rx="3">'
            )
            shapes.append(f"<title>{tip}</title></rect>")
            fits = next((each for each in (text, name) if len(each) * TEXT_WIDTH + 14 < side), "")
            if fits:
                shapes.append(
                    f'<text class="on" x="{x + side / 2 - 1:.1f}" y="31" text-anchor="middle">{escape(fits)}</text>'
                )
            x += side
        drawn.append(_svg(width, 52, f"bar {css}", title, shapes))
    return "".join(drawn) + _legend(labels)


def format_amount(value: float) -> str:
    """Writes a number with three significant digits, or as a whole one from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(width: int, height: int, css: str, title: str, shapes: list[str]) -> str:
    body = "".join(shapes)
    return (
        f'<svg class="chart {css}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{body}</svg>'
    )


def _legend(items: list[tuple[str, str, str]]) -> str:
    rows = "".join(f'<li><i class="key {color} {style}"></i>{escape(label)}</li>' for label, color, style in items)
    return f'<ul class="legend">{rows}</ul>'


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The axes of one drawing: turns values into pixels."""

    width: int
    height: int
    x_high: float
    y_high: float
    y_ticks: list[float]

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + value / self.x_high * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_high
        return self.bottom - (min(max(value, low), high) - low) / (high - low) * (self.bottom - TOP)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Grid lines, tick texts and axis labels."""
        shapes = [f'<text class="label" x="0" y="12">{escape(y_label)}</text>']
        for tick in self.y_ticks:
            y, text = self.y(tick), format_tick(tick, self.y_ticks[1] - self.y_ticks[0])
            shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right}"/>')
            shapes.append(f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
        ticks = nice_ticks(0, self.x_high, 8 if self.width > 600 else 4)
        for tick in ticks:
            if tick <= self.x_high * 1.001:
                text, anchor = format_tick(tick, ticks[1]), "end" if self.x(tick) > self.right - 8 else "middle"
                shapes.append(
                    f'<text x="{self.x(tick):.1f}" y="{self.bottom + 19}" text-anchor="{anchor}">{text}</text>'
                )
        middle = (LEFT + self.right) / 2
        shapes.append(
            f'<text class="label" x="{middle}" y="{self.height - 5}" text-anchor="middle">{escape(x_label)}</text>'
        )
        return shapes


def _thin(points: Sequence[tuple[float, float | None]], keep_peaks: bool) -> list[tuple[float, float | None]]:
    """Cuts a long curve to MAX_DRAWN_POINTS buckets; with `keep_peaks` each bucket shows its highest value."""
    if len(points) <= MAX_DRAWN_POINTS:
        return list(points)
    edges = [round(index * len(points) / MAX_DRAWN_POINTS) for index in range(MAX_DRAWN_POINTS + 1)]
    buckets = [points[first:last] for first, last in itertools.pairwise(edges)]
    if not keep_peaks:
        return [bucket[0] for bucket in buckets]
    return [max(bucket, key=lambda point: -math.inf if point[1] is None else point[1]) for bucket in buckets]


def _curve(series: Series, frame: _Frame) -> list[str]:
    stretches: list[list[str]] = [[]]
    ends: list[tuple[float, float]] = []
    for x, y in _thin(series.points, keep_peaks=series.style != "dots"):
        if y is None:
            stretches.append([])
            continue
        if not stretches[-1]:
            ends.append((frame.x(x), frame.x(x)))
        ends[-1] = (ends[-1][0], frame.x(x))
        stretches[-1].append(f"{frame.x(x):.1f} {frame.y(y):.1f}")
    stretches = [stretch for stretch in stretches if stretch]
    if series.style == "dots":
        path = "".join(f"M{point}h0" for stretch in stretches for point in stretch)
        return [f'<path class="dots {series.color}" d="{path}"/>']
    lines = ["M" + "L".join(stretch) + ("h0" if len(stretch) == 1 else "") for stretch in stretches]
    shapes = [f'<path class="{series.style} {series.color}" d="{"".join(lines)}"/>']
    if series.style == "area":
        shade = "".join(
            f"{line}L{last:.1f} {frame.bottom}L{first:.1f} {frame.bottom}Z"
            for line, (first, last) in zip(lines, ends, strict=True)
        )
        shapes.insert(0, f'<path class="shade {series.color}" d="{shade}"/>')
    return shapes


def _hover(series: Sequence[Series], x_label: str, frame: _Frame) -> list[str]:
    """Invisible columns whose `<title>` tells the values below the pointer."""
    columns: dict[int, tuple[float, dict[str, float]]] = {}
    side = (frame.right - LEFT) / MAX_HOVER_COLUMNS
    for each in series:
        for x, y in each.points:
            column = min(int((frame.x(x) - LEFT) / side), MAX_HOVER_COLUMNS - 1)
            if y is not None:
                columns.setdefault(column, (x, {}))[1].setdefault(each.label, y)
    shapes = []
    for column, (x, values) in sorted(columns.items()):
        tip = f"{x_label} {format_amount(x)}" + "".join(f" · {name} {format_amount(y)}" for name, y in values.items())
        place = f'x="{LEFT + column * side:.1f}" y="{TOP}" width="{side:.1f}" height="{frame.bottom - TOP}"'
        shapes.append(f'<rect class="hit" {place}><title>{escape(tip)}</title></rect>')
    return shapes


STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #ffffff; --ink: #1d1c1a; --soft: #66635d; --line: #e5e2dc;
  --bad: #b3311f; --c1: #2f5fd0; --c2: #bd7410; --c3: #17806f; --c4: #8a63c9; --c5: #928e86; --on: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #141416; --card: #1c1c1f; --ink: #ecebe8; --soft: #a3a09a; --line: #313136; --bad: #ff8a75; --c1:
    #86a8ff; --c2: #f0b055; --c3: #55c9b4; --c4: #b898f0; --c5: #77746e; --on: #141416; }
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
.pairs + .missing { margin-top: 20px; }
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
.key.area, .key.bar { width: 11px; height: 11px; border-radius: 3px; vertical-align: -1px; }
.key.steps { background: repeating-linear-gradient(90deg, var(--c) 0 2px, transparent 2px 5px); }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; }
summary span { color: var(--soft); font-weight: 400; font-size: 14px; margin-left: 6px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; margin-bottom: 16px; }
th, td { text-align: left; vertical-align: top; padding: 6px 16px 6px 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { width: 36%; font-weight: 400; color: var(--soft); }
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
