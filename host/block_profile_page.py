"""The page of a profile: which blocks the pictures need the prompt in, the cut, how clear it is, what it cost.

Reads a `BlockProfile` and pictures of the run that made it, writes one HTML file that needs nothing beside it.
Command: `pocketdit profile --photos PHOTOS`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from host.block_profile import (
    SHARES,
    BlockProfile,
    Curves,
    Decision,
    agreement_text,
    counted,
    cut_text,
    mean_curves,
)
from host.block_selection import Example
from host.charts import Mark, Series, escape, heat_map, line_chart
from host.page import Markup, details, document, duration_text, embedded_picture, plate, section, table, tile
from runtime import atomic

COLORS = ("c1", "c2", "c3", "c4")


def write_page(profile: BlockProfile, path: Path, share: float, examples: Sequence[Example] = ()) -> Path:
    """Writes the page.

    Args:
        profile: Measured, with its curves.
        path: File to write.
        share: Share of the blocks whose cut the page is about.
        examples: Pictures to show.
    """
    atomic.write_bytes(path, page(profile, share, examples).encode())
    return path


def page(profile: BlockProfile, share: float, examples: Sequence[Example] = ()) -> str:
    """The HTML."""
    decisions = [profile.decide(each) for each in sorted({*SHARES, share})]
    asked = profile.decide(share)
    body = _header(profile, asked) + _tiles(profile, asked) + _examples(profile, examples)
    body += _sensitivity(profile, asked) + _curves(profile, decisions) + _clear(profile, decisions) + _quick(profile)
    body += section(
        "settings", "Settings", "", details("Settings", "what the pictures were made with", profile.settings)
    )
    return document(
        title=profile.model,
        kind="block profile",
        body=body,
        footer=f"Made by {profile.created_by.replace('pocketdit', 'PocketDiT')}.",
    )


def _header(profile: BlockProfile, asked: Decision) -> str:
    head, tail = asked.cut
    masked = "the base, without fine-tuning" if profile.mode == "quick" else "the model fine-tuned on each subject"
    ends = [f"the {name} {count}" for name, count in (("first", head), ("last", tail)) if count]
    verdict = (
        f"To train {profile.num_blocks - head - tail} of {profile.num_blocks} blocks, skip {' and '.join(ends) or 'none'}. "
        f"Found by masking the prompt in {masked}."
    )
    return (
        f'<header><div><p class="eyebrow">Block profile</p><h1>{escape(profile.model)}</h1>'
        f'<p class="verdict"><span class="badge">{escape(profile.mode)}</span>{escape(verdict)}</p></div></header>'
    )


def _tiles(profile: BlockProfile, asked: Decision) -> str:
    choice, stability, cost = asked.choice, asked.stability, profile.cost
    assert choice is not None
    assert stability is not None
    clear = "the only way"
    if choice.margin is not None and choice.runner_up is not None:
        clear = f"{choice.margin:.1%} less change than with the next best, {cut_text(choice.runner_up)}"
    near = f"of resampled subjects and pictures; {stability.near_share:.0%} within a block of it"
    tiles = [
        tile(f"Cut for {asked.share:.0%}", cut_text(asked.cut), clear),
        tile("Same cut in", f"{stability.same_share:.0%}", near, stability.same_share),
    ]
    if cost is not None:
        subjects = f"{cost.subjects} subject{'s' if cost.subjects > 1 else ''}"
        taught = f"fine-tuning {duration_text(cost.fine_tuning_s)}" if profile.mode == "full" else "no fine-tuning"
        parts = f"{cost.pictures:,} pictures of {subjects}; {taught}"
        tiles.append(tile("Took", duration_text(cost.total_s), parts))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _examples(profile: BlockProfile, examples: Sequence[Example]) -> str:
    if not examples:
        return ""
    figures = []
    for example in examples:
        shown = embedded_picture(example.path.parent, example.path.name, example.label)
        figures.append(f'<figure class="photo">{shown}<figcaption>{escape(example.label)}</figcaption></figure>')
    first = profile.pictures[0]
    lead = (
        f"One prompt, one seed: “{first.prompt}”, seed {first.seed}. A cut is good where both of its pictures are close to the "
        "one with nothing masked."
    )
    return section("pictures", "What masking does", lead, f'<div class="photos">{"".join(figures)}</div>')


def _sensitivity(profile: BlockProfile, asked: Decision) -> str:
    subjects = list(dict.fromkeys(picture.subject for picture in profile.pictures))
    head, tail = asked.cut
    spans = [(0, head, f"first {head} skipped"), (profile.num_blocks - tail, tail, f"last {tail} skipped")]
    charts = []
    for name, size, heading in (
        ("single", 1, "One block masked"),
        ("window", profile.window, f"{profile.window} blocks in a row masked, at the middle one"),
    ):
        groups = {"all subjects": list(profile.pictures)}
        if len(subjects) > 1:
            groups |= {subject: [p for p in profile.pictures if p.subject == subject] for subject in subjects}
        rows = [(label, _means(chosen, name, size, profile.num_blocks)) for label, chosen in groups.items()]
        chart = heat_map(rows, title=heading, x_label="block", spans=[span for span in spans if span[1]])
        charts.append(
            f"<h3>{escape(heading)}</h3>"
            + plate(chart, "The stronger the colour, the more change; one scale in this chart.")
        )
    lead = (
        "How much a picture changes when image tokens cannot attend to the prompt there: 1 - cosine of the "
        f"{profile.features} features to those of the unmasked picture from the same noise."
    )
    return section("sensitivity", "Where the prompt matters", lead, "".join(charts))


def _means(pictures: Sequence[Curves], name: str, size: int, num_blocks: int) -> list[float | None]:
    """A mean for each block; a window's at its middle."""
    values = np.array([getattr(picture, name) for picture in pictures]).mean(0).tolist()
    before = (size - 1) // 2
    return [None] * before + values + [None] * (num_blocks - before - len(values))


def _curves(profile: BlockProfile, decisions: Sequence[Decision]) -> str:
    first, last = mean_curves(profile.pictures)
    growth = line_chart(
        [
            Series(label="first n masked", points=list(enumerate(first)), style="line", color="c1"),
            Series(label="last m masked", points=list(enumerate(last)), style="line", color="c2"),
        ],
        title="Change of the pictures over the number of blocks masked",
        x_label="blocks masked",
        y_label="1 - cosine",
    )
    series, marks = [], []
    for decision, color in zip(decisions, COLORS, strict=False):
        k = sum(decision.cut)
        points: list[tuple[float, float | None]] = [(n, first[n] + last[k - n]) for n in range(k + 1)]
        series.append(Series(label=f"{decision.share:.0%}, {k} blocks", points=points, style="line", color=color))
        marks.append(Mark(x=decision.cut[0], label=f"{decision.share:.0%}: {cut_text(decision.cut)}"))
    costs = line_chart(
        series,
        title="Cost of a cut over the blocks skipped at the head",
        x_label="of these at the head",
        y_label="head + tail",
        marks=marks,
    )
    lead = "The cut with the smallest sum of both curves is taken, among all that skip as many blocks."
    return section("cut", "Which cut", lead, plate(growth) + "<h3>Every way to divide the blocks</h3>" + plate(costs))


def _clear(profile: BlockProfile, decisions: Sequence[Decision]) -> str:
    rows = []
    for decision in decisions:
        choice, stability = decision.choice, decision.stability
        assert choice is not None
        assert stability is not None
        next_best = Markup("—")
        if choice.runner_up is not None:
            next_best = _with_note(cut_text(choice.runner_up), f"the best is {choice.margin:.1%} below")
        parts = {"without a subject": stability.without_subject, "by a seed alone": stability.with_seed}
        fewer = "; ".join(f"{counted(decision.cut, cuts)} {name}" for name, cuts in parts.items() if cuts)
        rows.append(
            [
                f"{decision.share:.0%}",
                cut_text(decision.cut),
                _with_note(f"{choice.cost:.3f}", f"half at either end {choice.even_cost:.3f}"),
                next_best,
                _with_note(f"{stability.same_share:.0%}, near {stability.near_share:.0%}", fewer),
            ]
        )
    head = ["skip", "cut", "cost", "next best", "same cut in resamples"]
    lead = (
        "Cost is the mean change with the head masked and with the tail masked, added. Resamples draw subjects and their "
        "pictures with replacement; below is how often fewer pictures give the same cut."
    )
    return section("clear", "How clear it is", lead, table(head, rows))


def _with_note(text: str, note: str) -> Markup:
    return Markup(f"{escape(text)}<small>{escape(note)}</small>")


def _quick(profile: BlockProfile) -> str:
    found = profile.agreement
    if found is None:
        return ""
    rows = [
        [
            f"{each.share:.0%}",
            cut_text(each.full),
            cut_text(each.quick),
            "—" if each.excess is None else f"{each.excess:.1%}",
        ]
        for each in found.cuts
    ]
    body = table(["skip", "fine-tuned", "base (--quick)", "what the quick cut costs more"], rows)
    lead = agreement_text(found).split(";")[0] + "."
    return section("quick", "Would the base alone have said so?", lead[0].upper() + lead[1:], body)
