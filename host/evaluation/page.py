"""The page of an evaluation: one `evaluation.html` that needs nothing beside it.

Reads the content of `evaluation.json` and the pictures it names. Writes the page, in the look of report.html.
Command: `pocketdit evaluate RUN`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host.charts import escape
from host.page import Markup, details, document, embedded_picture, section, table, tile
from runtime import atomic

FILE_NAME = "evaluation.html"
MAX_PAIRS, MAX_DRIFT_PAIRS = 160, 12
"""Pairs of pictures in the page; the folder has them all."""
SMALL_BYTES, SMALL_SIDE = 60_000, 320
MEASURE_NAMES = {"subject": "Subject", "prompt": "Prompt", "drift": "Drift"}
FEW_SUBJECTS = 6
EXPLANATIONS = {
    "subject": "Subject: mean cosine of a picture's features to those of all photos of the subject. Higher is closer.",
    "prompt": "Prompt: CLIP-T is the cosine of a picture and its prompt; background is the probability a classifier gives "
    "to the background the prompt names, and the share of pictures where it is the likeliest. Higher is closer.",
    "drift": "Drift: 1 - cosine of the base's and the adapter's picture from the same noise, for prompts that do not name "
    "the subject. 0 means that nothing changed.",
}
INTERVALS = (
    "In brackets the 95 % confidence interval: subjects are resampled first, then the pictures of each. The difference is "
    "that of pairs from the same prompt and noise."
)


def write_page(made: dict[str, Any], folder: Path) -> Path:
    """Writes the page of an evaluation.

    Args:
        made: Content of `evaluation.json`.
        folder: Where it and the pictures lie.

    Returns:
        The path of the page.
    """
    parts = (_header(made), _tiles(made), _scores(made), _subjects(made), _pictures(made, folder), _drift(made, folder))
    names = ", ".join(run["name"] for run in made["runs"])
    page = document(
        title=names,
        kind="evaluation",
        body="".join(parts) + _settings(made),
        footer=f"Made by PocketDiT {made['version']} from {names}.",
    )
    atomic.write_bytes(folder / FILE_NAME, page.encode())
    return folder / FILE_NAME


def score_table(made: dict[str, Any]) -> str:
    """The scores as a text table for the terminal."""
    head = ("", "base", "adapter", "difference")
    rows: list[tuple[str, ...]] = [head]
    for metric in made["metrics"]:
        found = made["summary"][metric["key"]]
        rows.append((_name(metric), *(_interval_text(found.get(kind), kind) for kind in head[1:])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{_counts(made)}; 95 % confidence intervals in brackets", *lines])


def _name(metric: dict[str, Any]) -> str:
    return f"{MEASURE_NAMES[metric['measure']]}, {metric['title']}"


def _short(metric: dict[str, Any]) -> str:
    """Below a picture."""
    return str(metric["title"]).partition(",")[0]


def _interval_text(summary: dict[str, Any] | None, kind: str) -> str:
    if summary is None:
        return "—"
    return f"{_number(summary['mean'], kind)} [{_number(summary['low'], kind)}, {_number(summary['high'], kind)}]"


def _number(value: float, kind: str) -> str:
    return f"{value:+.3f}" if kind == "difference" else f"{value:.3f}"


def _counts(made: dict[str, Any]) -> str:
    subjects, pairs = len(made["by_subject"]), len(made["pictures"])
    prompts = len({row["prompt"] for row in made["pictures"]})
    seeds = len(made["settings"]["seeds"])
    return (
        f"{_plural(subjects, 'subject')}, {_plural(prompts, 'prompt')}, {_plural(seeds, 'seed')}: {_plural(pairs, 'picture')} "
        f"each by base and adapter, {_plural(len(made['drift']), 'pair')} for drift"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _header(made: dict[str, Any]) -> str:
    runs = made["runs"]
    title = runs[0]["instance_prompt"] if len(runs) == 1 else f"{len(made['by_subject'])} subjects"
    metric = made["metrics"][0]
    difference = made["summary"][metric["key"]]["difference"]
    if difference["low"] <= 0 <= difference["high"]:
        verdict = f"No difference in likeness to the subject can be told from chance ({metric['title']})"
    else:
        way = "closer to" if difference["mean"] > 0 else "further from"
        verdict = f"The adapter's pictures are {way} the photos than the base's ({metric['title']})"
    verdict += f": {_interval_text(difference, 'difference')}."
    return (
        f'<header><div><p class="eyebrow">PocketDiT evaluation</p><h1 dir="auto">{escape(title)}</h1>'
        f'<p class="verdict">{escape(verdict)}</p></div></header>'
    )


def _tiles(made: dict[str, Any]) -> str:
    tiles, shown = [], set()
    for metric in made["metrics"]:
        if metric["measure"] in shown:
            continue
        shown.add(metric["measure"])
        found = made["summary"][metric["key"]]
        adapter, name = found["adapter"]["mean"], MEASURE_NAMES[metric["measure"]]
        if "base" in found:
            base = found["base"]["mean"]
            before, after = f"{base:.2f}", f"{adapter:.2f}"
            fell = before != after and found["difference"]["high"] < 0
            note = f"{metric['title']}; base → adapter"
            tiles.append(tile(f"{name} fidelity", f"{before} → {after}", note, adapter, fell))
        else:
            tiles.append(tile(name, f"{adapter:.2f}", f"{metric['title']}; 0 is unchanged", adapter))
    return f'<section id="numbers" aria-label="Headline numbers"><div class="tiles">{"".join(tiles)}</div></section>'


def _scores(made: dict[str, Any]) -> str:
    rows = []
    for metric in made["metrics"]:
        found = made["summary"][metric["key"]]
        name = Markup(f"{escape(_name(metric))}<small>{escape(metric['source'])}</small>")
        rows.append([name, *(_cell(found.get(kind), kind) for kind in ("base", "adapter", "difference"))])
    measured = {metric["measure"] for metric in made["metrics"]}
    points = [text for measure, text in EXPLANATIONS.items() if measure in measured] + [INTERVALS]
    if len(made["by_subject"]) == 1:
        points.append(
            "There is one subject: the intervals say how much its pictures vary, not how other subjects would do."
        )
    elif len(made["by_subject"]) < FEW_SUBJECTS:
        points.append(f"With fewer than {FEW_SUBJECTS} subjects the intervals are shorter than 95 % asks for.")
    listed = "".join(f"<li>{escape(point)}</li>" for point in points)
    body = table(("Measure", "Base", "Adapter", "Difference"), rows) + f'<ul class="points">{listed}</ul>'
    return section("scores", "Scores", f"{_counts(made)}.", body)


def _cell(summary: dict[str, Any] | None, kind: str) -> str:
    if summary is None:
        return "—"
    low, high = _number(summary["low"], kind), _number(summary["high"], kind)
    return Markup(f"{escape(_number(summary['mean'], kind))}<small>[{escape(low)}, {escape(high)}]</small>")


def _subjects(made: dict[str, Any]) -> str:
    """A table of the subjects for the first metric of each measure; nothing where there is one subject."""
    if len(made["by_subject"]) < 2:
        return ""
    first: dict[str, dict[str, Any]] = {}
    for metric in made["metrics"]:
        first.setdefault(metric["measure"], metric)
    rows = []
    for subject, found in made["by_subject"].items():
        cells = []
        for metric in first.values():
            summary = found.get(metric["key"])
            kind = "adapter" if metric["measure"] == "drift" else "difference"
            cells.append(_cell(summary and summary[kind], kind))
        rows.append([subject, *cells])
    head = ["Subject", *(f"{_name(m)}{'' if m['measure'] == 'drift' else ', difference'}" for m in first.values())]
    lead = "Here the intervals are over the pictures of one subject."
    return section("subjects", "Each subject", lead, table(head, rows))


def _pictures(made: dict[str, Any], folder: Path) -> str:
    rows, seeds = made["pictures"], made["settings"]["seeds"]
    per_run = max(1, MAX_PAIRS // len(made["runs"]))
    shown, body = 0, []
    for run in made["runs"]:
        own = [row for row in rows if row["run"] == run["name"]]
        # All prompts with the first seed, then with the second, as far as there is room; listed by prompt again.
        kept = sorted(own, key=lambda row: seeds.index(row["seed"]))[:per_run]
        shown += len(kept)
        heading = run["subject"] + (f" ({run['name']})" if run["name"] != run["subject"] else "")
        photos = _photos(run) if run["photos"] else ""
        body.append(f'<h3><bdi>{escape(heading)}</bdi></h3><div class="photos">{photos}</div>')
        body.append(_grid(made, [row for row in own if row in kept], folder))
    left = f" {shown:,} of {len(rows):,} pairs are shown; the folder has all." if shown < len(rows) else ""
    lead = "A photo or more of each subject, then its pictures: each pair starts from the same noise, left the base, right the "
    return section("pictures", "Pictures", f"{lead}same model with the adapter.{left}", "".join(body))


def _photos(run: dict[str, Any]) -> str:
    figures = []
    for number, name in enumerate(run["photos"][:6], 1):
        path = Path(name)
        alt = f"Photo {number} of {run['subject']}"
        picture = embedded_picture(path.parent, path.name, alt, max_bytes=SMALL_BYTES, max_side=SMALL_SIDE)
        figures.append(f'<figure class="photo">{picture}</figure>')
    return "".join(figures)


def _grid(made: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> str:
    metrics = [metric for metric in made["metrics"] if metric["measure"] != "drift"]
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    if all(len(pairs) == 1 for pairs in by_prompt.values()):
        return f'<div class="pairs">{"".join(_pair(row, metrics, folder, prompt=True) for row in rows)}</div>'
    body = []
    for prompt, pairs in by_prompt.items():
        tag = '<span class="tag">trained with</span>' if pairs[0].get("unseen") is False else ""
        figures = "".join(_pair(row, metrics, folder) for row in pairs)
        body.append(f'<h3><bdi>{escape(prompt)}</bdi>{tag}</h3><div class="pairs">{figures}</div>')
    return "".join(body)


def _pair(row: dict[str, Any], metrics: Sequence[dict[str, Any]], folder: Path, *, prompt: bool = False) -> str:
    """Base and adapter side by side; with `prompt` the caption says what was asked for."""
    halves = []
    for kind, css in (("base", "before"), ("adapter", "after")):
        alt = f"{kind}, seed {row['seed']}: {row['prompt']}"
        picture = embedded_picture(folder, row[kind], alt, max_bytes=SMALL_BYTES, max_side=SMALL_SIDE)
        below = "".join(
            f'<span class="similarity">{escape(_short(metric))} {row["scores"][metric["key"]][kind]:.2f}</span>'
            for metric in metrics
            if metric["key"] in row["scores"] and not metric["key"].endswith("-right")
        )
        halves.append(f'<div><span class="when {css}">{kind.capitalize()}</span>{picture}{below}</div>')
    drift = [f"{key.partition(':')[2]} {value:.2f}" for key, value in row["scores"].items() if isinstance(value, float)]
    caption = f"Seed {row['seed']}" + (f"; drift {', '.join(drift)}" if drift else "")
    asked = f"<bdi>{escape(row['prompt'])}</bdi>. " if prompt else ""
    return (
        f'<figure class="pair"><div>{"".join(halves)}</div><figcaption>{asked}{escape(caption)}</figcaption></figure>'
    )


def _drift(made: dict[str, Any], folder: Path) -> str:
    rows = made["drift"]
    key = next(metric["key"] for metric in made["metrics"] if metric["measure"] == "drift")
    worst = sorted(rows, key=lambda row: -row["scores"][key])[:MAX_DRIFT_PAIRS]
    lead = "What base and adapter draw for prompts that do not name the subject"
    lead += (
        f", the {len(worst)} furthest apart of {len(rows)} pairs."
        if len(worst) < len(rows)
        else ", furthest apart first."
    )
    figures = (_pair(row, [], folder, prompt=True) for row in worst)
    return section("drift", "Drift", lead, f'<div class="pairs">{"".join(figures)}</div>')


def _settings(made: dict[str, Any]) -> str:
    groups = [
        ("Pictures", "how they were drawn", made["settings"]),
        ("Intervals", "", made["intervals"]),
        *((f"Feature model {each['title']}", each["name"], each) for each in made["features"]),
    ]
    if made["backgrounds"]:
        groups.append(("Backgrounds", "the classifier of the tiny world, on held-out labels", made["backgrounds"]))
    groups += [(f"Run {run['name']}", run["subject"], run) for run in made["runs"]]
    return section("settings", "Settings", "", "".join(details(name, note, values) for name, note, values in groups))
