"""Charts of the reports: reads numbers, writes inline SVG; its style is in page.py.

No dependency and no script: values on hover are SVG `<title>` elements. Each chart is drawn twice, for wide and for
narrow screens, because text inside a scaled SVG shrinks with it; the style sheet shows one of the two.
Commands: `pocketdit report RUN`, `pocketdit emulate BUNDLE`.
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
MIN_COLUMN_WIDTH = 6
MARK_ROWS, MARK_HEIGHT, MARK_TEXT_WIDTH = 3, 18, 8.2
CELL_HEIGHT = 30
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A shaded stretch of the x axis, such as a phase."""

    start: float
    end: float
    label: str
    """What it is, on hover."""
    group: str
    """Name in the legend, shared by all bands of a kind."""
    color: str
    """Colour class of the style sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A labelled moment on the x axis, such as a fault."""

    x: float
    label: str
    """Empty for the line alone."""
    bad: bool = False
    """Drawn as the budget line is."""


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
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
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
        bands: Shaded stretches behind the curves.
        marks: Moments in front of them.

    Returns:
        A legend and two `<svg>` elements, wide and narrow.
    """
    values = [y for each in series for _, y in each.points if y is not None]
    assert values, "a chart needs at least one value"
    y_high = max(y_low, min(max(values), math.inf if y_cap is None else y_cap))
    if limit is not None:
        y_high = max(y_high, limit.value * 1.12)  # room for the label
    y_high += 0.03 * (y_high - y_low) if y_high > y_low else abs(y_high) or 1.0
    num_rows = min(MARK_ROWS, sum(bool(mark.label) for mark in marks))
    plot_height = height - TOP - BOTTOM
    y_high += (
        (y_high - y_low) * MARK_HEIGHT * num_rows / (plot_height - MARK_HEIGHT * num_rows)
    )  # room for their labels
    y_ticks = [tick for tick in nice_ticks(y_low, y_high, height // 40) if tick <= y_high]
    x_high = max([x for each in series for x, _ in each.points] + [mark.x for mark in marks] + [0.0]) or 1.0
    drawn = []
    for width, css in WIDTHS:
        frame = _Frame(width=width, height=height, x_high=x_high, y_high=y_high, y_ticks=y_ticks)
        shapes = _bands(bands, frame) + frame.axes(x_label, y_label)
        for each in series:
            shapes += _curve(each, frame)
        if limit is not None:
            y = frame.y(limit.value)
            shapes.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{frame.right}"/>')
            shapes.append(
                f'<text class="limit" x="{frame.right}" y="{y - 6:.1f}" text-anchor="end">{escape(limit.label)}</text>'
            )
        shapes += _marks(marks, frame) + _hover(series, x_label, frame)
        drawn.append(_svg(width, height, css, title, shapes))
    legend = [(each.label, each.color, str(each.style)) for each in series]
    legend += list(dict.fromkeys((band.group, band.color, "band") for band in bands))
    return _legend(legend) + "".join(drawn)


def stacked_columns(
    columns: Sequence[tuple[float, Sequence[float]]],
    parts: Sequence[tuple[str, str]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    height: int = 240,
) -> str:
    """Draws a column per whole x, its parts on top of each other; where there are too many, the mean of neighbours.

    Args:
        columns: (x, value of each part) in order of x; at least one.
        parts: (label, colour class), the lowest first.
        title: Alternative text for those who cannot see the chart.
        x_label: Quantity below the x axis, such as the step.
        y_label: Quantity and unit above the y axis.
        height: Height in pixels at full width.

    Returns:
        A legend and two `<svg>` elements, wide and narrow.
    """
    assert columns, "a chart needs at least one column"
    drawn = []
    for width, css in WIDTHS:
        size = math.ceil(len(columns) / (width // MIN_COLUMN_WIDTH))
        groups = [columns[start : start + size] for start in range(0, len(columns), size)]
        means = [[sum(column) / len(group) for column in zip(*(v for _, v in group), strict=True)] for group in groups]
        y_high = 1.03 * max(max(sum(values) for values in means), 0.0) or 1.0
        y_ticks = [tick for tick in nice_ticks(0, y_high, height // 40) if tick <= y_high]
        frame = _Frame(width=width, height=height, x_high=columns[-1][0] + 0.5, y_high=y_high, y_ticks=y_ticks)
        shapes = frame.axes(x_label, y_label, whole=True)
        for group, values in zip(groups, means, strict=True):
            (first, _), (last, _) = group[0], group[-1]
            left, right = frame.x(first - 0.5), frame.x(last + 0.5)
            side = max(right - left - (1.5 if right - left > 5 else 0), 0.5)
            tip = f"{x_label} {first:g}" + (f" to {last:g}, mean" if last > first else "")
            base = 0.0
            for (_, color), value in zip(parts, values, strict=True):
                top, bottom = frame.y(base + max(value, 0.0)), frame.y(base)
                place = f'x="{left:.1f}" y="{top:.1f}" width="{side:.1f}" height="{bottom - top:.1f}"'
                shapes.append(f'<rect class="fill {color}" {place}/>')
                base += max(value, 0.0)
            tip += "".join(f" · {name} {format_amount(value)}" for (name, _), value in zip(parts, values, strict=True))
            place = f'x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" height="{frame.bottom - TOP}"'
            shapes.append(f'<rect class="hit" {place}><title>{escape(tip)}</title></rect>')
        drawn.append(_svg(width, height, css, title, shapes))
    return _legend([(name, color, "bar") for name, color in parts]) + "".join(drawn)


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


def heat_map(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    title: str,
    x_label: str,
    spans: Sequence[tuple[int, int, str]] = (),
) -> str:
    """Draws a row of cells for each (label, values), stronger in colour where higher, on one scale; None leaves a gap.

    Args:
        rows: Of the same length, with at least one value.
        title: Alternative text for those who cannot see the chart.
        x_label: What a column is, below them.
        spans: (first column, columns, label) of brackets below the cells.

    Returns:
        Two `<svg>` elements, wide and narrow.
    """
    num_columns, drawn = len(rows[0][1]), []
    high = max((value for _, values in rows for value in values if value is not None), default=0.0) or 1.0
    for width, css in WIDTHS:
        side, shapes, top = width / num_columns, [], 0
        gap = min(2.0, side / 6)
        for label, values in rows:
            shapes.append(f'<text class="label" x="0" y="{top + 12}">{escape(label)}</text>')
            for column, value in enumerate(values):
                if value is None:
                    continue
                share, x, tip = max(value, 0.0) / high, column * side, f"{label} · {x_label} {column} · {value:.3f}"
                inner = f'width="{side - gap:.1f}" height="{CELL_HEIGHT}" rx="{1.5 * gap:.1f}"'
                place = f'x="{x:.1f}" y="{top + 20}" {inner}'
                opacity = f'fill-opacity="{0.06 + 0.94 * share:.3f}"'
                shapes.append(f'<rect class="fill c1" {opacity} {place}><title>{escape(tip)}</title></rect>')
                if (text := f"{value:.2f}") and len(text) * TEXT_WIDTH + 8 < side:
                    where = f'x="{x + side / 2 - 1:.1f}" y="{top + 20 + CELL_HEIGHT / 2 + 4.5:.1f}"'
                    bright = ' class="on"' if share > 0.5 else ""
                    shapes.append(f'<text{bright} {where} text-anchor="middle">{text}</text>')
            top += CELL_HEIGHT + 36
        every = math.ceil(4 * TEXT_WIDTH / side)
        for column in range(0, num_columns, every):
            x = (column + 0.5) * side - 1
            shapes.append(f'<text x="{x:.1f}" y="{top}" text-anchor="middle">{column}</text>')
        for first, count, label in spans:
            left, right = first * side + 1, (first + count) * side - 3
            anchor, x = ("start", left) if first == 0 else ("end", right)
            shapes.append(f'<path class="axis" d="M{left:.1f} {top + 10}v6H{right:.1f}v-6"/>')
            shapes.append(f'<text x="{x:.1f}" y="{top + 32}" text-anchor="{anchor}">{escape(label)}</text>')
        top += 40 if spans else 8
        shapes.append(
            f'<text class="label" x="{width / 2}" y="{top + 8}" text-anchor="middle">{escape(x_label)}</text>'
        )
        drawn.append(_svg(width, top + 14, css, title, shapes))
    return "".join(drawn)


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

    def axes(self, x_label: str, y_label: str, *, whole: bool = False) -> list[str]:
        """Grid lines, tick texts and axis labels; with `whole` only whole numbers below the x axis."""
        shapes = [f'<text class="label" x="0" y="12">{escape(y_label)}</text>']
        for tick in self.y_ticks:
            y, text = self.y(tick), format_tick(tick, self.y_ticks[1] - self.y_ticks[0])
            shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right}"/>')
            shapes.append(f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
        ticks = nice_ticks(0, self.x_high, 8 if self.width > 600 else 4)
        for tick in ticks:
            if tick <= self.x_high * 1.001 and not (whole and tick % 1):
                text, anchor = (
                    format_tick(tick, 1 if whole else ticks[1]),
                    "end" if self.x(tick) > self.right - 8 else "middle",
                )
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


def _bands(bands: Sequence[Band], frame: _Frame) -> list[str]:
    shapes = []
    for band in bands:
        left, right = frame.x(band.start), frame.x(min(band.end, frame.x_high))
        place = f'x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" height="{frame.bottom - TOP}"'
        shapes.append(f'<rect class="band {band.color}" {place}><title>{escape(band.label)}</title></rect>')
    return shapes


def _marks(marks: Sequence[Mark], frame: _Frame) -> list[str]:
    """Lines first, then their labels, each in the first row that has room; where none has, the line tells on hover."""
    lines, labels = [], []
    taken: list[list[tuple[float, float]]] = [[] for _ in range(MARK_ROWS)]
    for mark in sorted(marks, key=lambda each: each.x):
        x, css = frame.x(min(mark.x, frame.x_high)), "limit" if mark.bad else "mark"
        tip = f"<title>{escape(mark.label)}</title>" if mark.label else ""
        lines.append(f'<path class="{css}" d="M{x:.1f} {TOP}V{frame.bottom}">{tip}</path>')
        side = len(mark.label) * MARK_TEXT_WIDTH + 10
        anchor, start, place = ("start", x, x + 6) if x + side <= frame.right else ("end", x - side, x - 6)
        rows = (n for n, row in enumerate(taken) if all(start + side <= low or high <= start for low, high in row))
        if mark.label and (row := next(rows, None)) is not None:
            taken[row].append((start, start + side))
            where = f'x="{place:.1f}" y="{TOP + 13 + MARK_HEIGHT * row}" text-anchor="{anchor}"'
            labels.append(f'<text class="{css}" {where}>{escape(mark.label)}</text>')
    return lines + labels


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
