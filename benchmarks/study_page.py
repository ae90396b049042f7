"""The study's tables, its page and its sheets of pictures: `python -m benchmarks.study_page`.

Reads `results/study.json` and the sheets `study.py` left in `results/study/`; writes `results/study.html` and prints the
README's tables.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from benchmarks.study_jobs import BASE, PROMPT_BACKGROUNDS, Job, ablations, methods
from host import page
from host.evaluate import Summary, summarise, summarise_difference
from runtime import atomic
from runtime.memory import MIB

RESULTS = Path(__file__).parent / "results"
SCORES = ("subject", "recognised", "prompt", "drift")
REFERENCE, OURS = "lora", "ours-50"
"""What the methods', and what the ablations' subject fidelity is compared with, picture by picture."""
OVERVIEW = (BASE, "lora", "dreambooth-prior", "hollowed-net", "lora-patches", "lora-resize-small", "ours-50")
OVERVIEW_SUBJECT = "wind-chime"
"""Rows and subject of the README's picture."""
TILE, TITLE_WIDTH, HEAD = 96, 270, 24


def summaries(row: dict[str, Any]) -> dict[str, Summary]:
    """Mean and interval of each score of one method over subjects, prompts and seeds."""
    found = {}
    for score in SCORES:
        values = [(value, label) for label, scores in row["subjects"].items() for value in scores.get(score, [])]
        if values:
            found[score] = summarise([value for value, _ in values], [label for _, label in values])
    return found


def against(row: dict[str, Any], reference: dict[str, Any], score: str = "subject") -> Summary | None:
    """Difference of a score to another row's, paired by picture, over the subjects both have."""
    labels = [label for label in row["subjects"] if label in reference["subjects"]]
    pairs = [
        (own, other, label)
        for label in labels
        for own, other in zip(row["subjects"][label][score], reference["subjects"][label][score], strict=True)
    ]
    if not pairs:
        return None
    own, others, names = zip(*pairs, strict=True)
    return summarise_difference(own, others, names)


def quality_rows(found: dict[str, Any], names: Sequence[str], reference: str) -> list[list[str]]:
    """Cells of a table of quality, one row a method."""
    rows = []
    for name in names:
        row = found["rows"][name]
        scores = summaries(row)
        difference = None if name == reference else against(row, found["rows"][reference])
        rows.append(
            [
                row["title"],
                f"{row['rate']:g}" if row["rate"] else "",
                _interval(scores["subject"], 3),
                _signed(difference),
                f"{scores['recognised'].mean:.0%}",
                _interval(scores["prompt"], 2),
                _interval(scores["drift"], 3) if "drift" in scores and name != "base" else "",
            ]
        )
    return rows


def parted(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the base and the methods, and of the ablations with what they are compared with."""
    compared = [name for name in found["rows"] if name not in ablations()]
    others = [name for name in found["rows"] if name in ablations()]
    return compared, [OURS, *others] if others else []


def quality_head(reference: str) -> tuple[str, ...]:
    """Heads of the columns of `quality_rows`."""
    return ("method", "rate", "subject", f"to {SHORT[reference]}", "recognised", "prompt", "drift")


SHORT = {REFERENCE: "LoRA", OURS: "ours, 50%"}
COST_HEAD = ("method", "private memory", "step", "all steps", "GFLOP a step", "result", "on flash to train")


def cost_rows(found: dict[str, Any]) -> list[list[str]]:
    """Cells of the table of costs."""
    rows = []
    for name, cost in found["costs"].items():
        rows.append(
            [
                found["rows"].get(name, {"title": name})["title"],
                f"{cost['peak_private_bytes'] / MIB:.0f} MiB",
                f"{cost['step_ms']:.0f} ms",
                page.duration_text(cost["step_ms"] * found["steps"] / 1e3),
                f"{cost['flops'] / 1e9:.1f}",
                page.size_text(cost["result_bytes"]),
                page.size_text(cost["flash_bytes"]),
            ]
        )
    return rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the README has it."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _interval(summary: Summary, digits: int) -> str:
    return f"{summary.mean:.{digits}f} ({summary.low:.{digits}f} to {summary.high:.{digits}f})"


def _signed(summary: Summary | None) -> str:
    return "" if summary is None else f"{summary.mean:+.3f} ({summary.low:+.3f} to {summary.high:+.3f})"


def write_sheet(jobs: Sequence[tuple[str, Job]], path: Path) -> None:
    """One subject's pictures of the first seed: a row for each method, a column for each prompt; its photos on top.

    Args:
        jobs: Titles and finished jobs of one subject.
        path: JPEG to write.
    """
    photos = [Image.open(photo) for photo in sorted(jobs[0][1].photos_dir.glob("*.jpg"))]
    rows = [("its photos", photos)]
    for title, job in jobs:
        names = [f"p{number}_s{job.seeds[0]}.png" for number in range(len(PROMPT_BACKGROUNDS))]
        rows.append((title, [Image.open(job.dir / name) for name in names]))
    sheet = Image.new("RGB", (TITLE_WIDTH + TILE * len(PROMPT_BACKGROUNDS), HEAD + TILE * len(rows)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for column, name in enumerate(PROMPT_BACKGROUNDS):
        place = (TITLE_WIDTH + TILE * column + 3, TILE + 4)
        draw.text(place, name.removeprefix("a ").removeprefix("the "), "black", font)
    for number, (title, pictures) in enumerate(rows):
        top = TILE * number + (HEAD if number else 0)
        draw.text((4, top + TILE // 2 - 8), title, "black", font)
        for column, picture in enumerate(pictures):
            sheet.paste(picture.convert("RGB").resize((TILE - 2, TILE - 2)), (TITLE_WIDTH + TILE * column, top))
    with atomic.atomic_path(path) as temp:
        sheet.save(temp, format="JPEG", quality=86)


def write_overview(sheet: Path, path: Path) -> None:
    """A few rows of a subject's sheet, for the README."""
    whole, rows = Image.open(sheet), [BASE, *methods(), *ablations()]
    bands = [(0, HEAD + TILE)] + [(HEAD + TILE * (rows.index(name) + 1), TILE) for name in OVERVIEW]
    picture = Image.new("RGB", (whole.width, sum(height for _, height in bands)))
    place = 0
    for top, height in bands:
        picture.paste(whole.crop((0, top, whole.width, top + height)), (0, place))
        place += height
    with atomic.atomic_path(path) as temp:
        picture.save(temp, format="JPEG", quality=86)


def make_page(found: dict[str, Any], folder: Path) -> str:
    """The whole page."""
    first = next(iter(found["rows"].values()))
    count = len(first["subjects"])
    pictures = sum(len(scores["subject"]) for scores in first["subjects"].values())
    body = (
        '<header><div><p class="eyebrow">PocketDiT, the embedded base</p><h1>Does it work? The study</h1>'
        f'<p class="verdict">{len(found["rows"])} rows, {count} held-out subjects, {pictures} pictures a row, '
        f"{found['steps']} optimizer steps of four samples each, every rate found by the same search.</p></div></header>"
    )
    compared, others = parted(found)
    body += page.section(
        "quality",
        "Quality",
        "Means over subjects with 95 % intervals (cluster bootstrap over subjects, then pictures). Subject: cosine of "
        "EfficientNet-Lite2 features to the photos. To LoRA: the same, paired by picture. Recognised: the nearest of 137 "
        "labels is the subject's. Prompt: probability of the background asked for. Drift: 1 - cosine to the base's picture on "
        "prompts without the subject.",
        page.table(quality_head(REFERENCE), quality_rows(found, compared, REFERENCE)),
    )
    if others:
        body += page.section(
            "ablations",
            "What matters",
            "Ablations, at the rate found for the row they belong to.",
            page.table(quality_head(OURS), quality_rows(found, others, OURS)),
        )
    if found.get("costs"):
        body += page.section(
            "costs",
            "Costs",
            "One sample at a time, one thread, a process of its own; memory beyond the idle process, while steps are taken.",
            page.table(COST_HEAD, cost_rows(found)),
        )
    sheets = sorted((folder / "study").glob("*.jpg"))
    for sheet in sheets:
        label = sheet.stem.replace("-", " ")
        shown = page.embedded_picture(
            folder, f"study/{sheet.name}", f"pictures of {label} by every method", max_bytes=10**7
        )
        body += page.section(f"sheet-{sheet.stem}", label, "", page.plate(shown))
    return page.document(title="study", kind="study", body=body, footer=f"Made by {json.dumps(found['versions'])}.")


def main() -> None:
    """Writes the page and prints the tables."""
    found = json.loads((RESULTS / "study.json").read_text())
    with atomic.atomic_path(RESULTS / "study.html") as temp:
        temp.write_text(make_page(found, RESULTS))
    write_overview(RESULTS / "study" / f"{OVERVIEW_SUBJECT}.jpg", RESULTS / "study.jpg")
    compared, others = parted(found)
    print(markdown(quality_head(REFERENCE), quality_rows(found, compared, REFERENCE)))
    print(f"\n{markdown(quality_head(OURS), quality_rows(found, others, OURS))}")
    if found.get("costs"):
        print(f"\n{markdown(COST_HEAD, cost_rows(found))}")


if __name__ == "__main__":
    main()
