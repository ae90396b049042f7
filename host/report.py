"""The report of a run: one `report.html` that needs nothing beside it.

Reads `run.json`, `metrics.jsonl` and `pictures/` of a run, `manifest.json` and `preview/` of its bundle. Writes the
page: pictures as data URIs, charts as inline SVG, no script, and a content policy that forbids every request.
Command: `pocketdit report RUN`.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from host.charts import Limit, Series, escape, format_amount, line_chart, moving_mean, stacked_bar
from host.page import (
    amount_text,
    details,
    document,
    duration_text,
    embedded_picture,
    meter,
    mib_text,
    missing,
    plate,
    section,
    size_text,
    tile,
)
from host.report_inputs import MIB, ReportInputs, dicts, lookup, number, read_inputs
from runtime import atomic

STEP_PARTS = (("read", "c2"), ("forward", "c1"), ("backward", "c4"), ("optimizer", "c3"))
UNFINISHED = {"stopped": "Stopped early. ", "running": "Not finished yet. ", "failed": "Ended by an error. "}


def write_report(run_dir: Path, bundle_dir: Path, report_path: Path | None = None) -> Path:
    """Writes the report of a finished, stopped, failed or running run.

    Args:
        run_dir: Folder that training wrote.
        bundle_dir: Folder that the run was trained from; parts missing there become notes in the page.
        report_path: Where the page goes; `report.html` in the run folder by default.

    Returns:
        The path of the page.

    Raises:
        ValueError: If the run folder has no readable `run.json`, or one of another schema.
    """
    report_path = report_path or run_dir / "report.html"
    atomic.write_bytes(report_path, _page(read_inputs(run_dir, bundle_dir)).encode())
    return report_path


def summary_table(run_dir: Path) -> str:
    """Returns the run's headline numbers as a text table for the terminal; `—` stands for what was not measured.

    Raises:
        ValueError: If the run folder has no readable `run.json`, or one of another schema.
    """
    data = read_inputs(run_dir, run_dir)
    before, after = data.similarity()
    peak_mib, budget_mib = data.peak_and_budget_mib()
    lines = (
        ("steps", _steps_text(data)),
        ("ms per step (median)", amount_text(data.step_ms())),
        ("peak private memory", f"{mib_text(peak_mib)}{'' if budget_mib is None else f' of {mib_text(budget_mib)}'}"),
        ("read from flash", f"{size_text(data.total('streamed_bytes'))} streamed"),
        ("", f"{size_text(data.total('flash_read_bytes'))} from the device"),
        ("subject similarity", f"{_fixed(before)} base, {_fixed(after)} adapter"),
    )
    return "\n".join(f"{name:<22}{value}" for name, value in lines)


# Numbers and small pieces.


def _fixed(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _steps_text(data: ReportInputs) -> str:
    steps = number(data.run, "summary", "steps") or (data.rows[-1]["step"] if data.rows else 0)
    planned = number(data.run, "settings", "steps")
    return f"{steps:,.0f}" + ("" if planned in (None, steps) else f" of {planned:,.0f}")


def _no_metrics(data: ReportInputs, what: str) -> str:
    return missing(f"The run has no {what} yet.", "pocketdit train", data.bundle_dir)


# The page, from top to bottom.


def _page(data: ReportInputs) -> str:
    title = str(lookup(data.manifest, "subject", "instance_prompt") or "Untitled subject")
    sections = (_tiles, _photos, _pictures, _loss, _memory, _step_time, _patches, _settings)
    body = _header(data, title) + "".join(part(data) for part in sections)
    footer = f"Made by PocketDiT {data.run.get('version', '')} from the run {data.run_dir.resolve().name}."
    return document(title=title, kind="report", body=body, footer=footer)


def _header(data: ReportInputs, title: str) -> str:
    hero = ""
    photos, items = dicts(lookup(data.manifest, "subject", "photos")), dicts(data.pictures.get("items"))
    if photos and items:
        pictures_dir = data.run_dir / "pictures"
        pictures = (
            ("A photo", embedded_picture(data.bundle_dir, photos[0].get("preview"), "The first photo of the subject")),
            ("Before", embedded_picture(pictures_dir, items[0].get("base"), "The first picture before training")),
            ("After", embedded_picture(pictures_dir, items[0].get("adapter"), "The first picture after training")),
        )
        figures = (f"<figure>{picture}<figcaption>{name}</figcaption></figure>" for name, picture in pictures)
        hero = f'<div class="hero">{"".join(figures)}</div>'
    return (
        f'<header><div><p class="eyebrow">PocketDiT training report</p><h1 dir="auto">{escape(title)}</h1>'
        f'<p class="verdict">{escape(_verdict(data))}</p></div>{hero}</header>'
    )


def _verdict(data: ReportInputs) -> str:
    how_far, (before, after) = f"{_steps_text(data)} steps", data.similarity()
    if before is None or after is None:
        taught = f"Trained for {how_far}; subject similarity is not measured yet"
    elif _fixed(before) == _fixed(after):
        taught = f"Subject similarity stayed at {_fixed(after)} in {how_far}"
    else:
        way = "rose" if after > before else "fell"
        taught = f"Subject similarity {way} from {_fixed(before)} to {_fixed(after)} in {how_far}"
    peak_mib, budget_mib = data.peak_and_budget_mib()
    held = "" if peak_mib is None else f"; peak private memory {mib_text(peak_mib)}"
    if peak_mib is not None and budget_mib is not None:
        held += f"{', over its' if peak_mib > budget_mib else ' of a'} budget of {mib_text(budget_mib)}"
    return f"{UNFINISHED.get(str(data.run.get('status')), '')}{taught}{held}."


def _tiles(data: ReportInputs) -> str:
    before, after = data.similarity()
    peak_mib, budget_mib = data.peak_and_budget_mib()
    share = peak_mib / budget_mib if peak_mib is not None and budget_mib else None
    limit = "no budget was set" if budget_mib is None else f"of a budget of {mib_text(budget_mib)}"
    step_ms, streamed_bytes = data.step_ms(), data.total("streamed_bytes")
    tiles = []
    if before is None or after is None:
        tiles.append(tile("Subject similarity", "—", "not measured yet"))
    else:
        values = f"{_fixed(before)} → {_fixed(after)}"
        tiles.append(tile("Subject similarity", values, "before → after; 1 is the same", after, after < before))
    tiles += [
        tile("Peak private memory", mib_text(peak_mib), limit, share, share is not None and share > 1),
        tile("Time per step", "—" if step_ms is None else f"{format_amount(step_ms)} ms", "median of all steps"),
        tile("Training time", duration_text(data.total("seconds")), f"{_steps_text(data)} steps"),
        tile(
            "Read from flash", size_text(data.total("flash_read_bytes")), f"{size_text(streamed_bytes)} streamed in all"
        ),
    ]
    num_blocks = number(data.manifest, "base", "num_blocks")
    if num_blocks is not None:
        head, tail = (int(number(data.manifest, "cut", end) or 0) for end in ("head", "tail"))
        note = f"of {num_blocks:.0f}; first {head} and last {tail} skipped"
        tiles.append(tile("Blocks trained", f"{num_blocks - head - tail:.0f}", note))
    return f'<section id="numbers" aria-label="Headline numbers"><div class="tiles">{"".join(tiles)}</div></section>'


def _photos(data: ReportInputs) -> str:
    photos = dicts(lookup(data.manifest, "subject", "photos"))
    if not photos:
        what = (
            f"The bundle {data.bundle_dir} lists no photos: give the report the bundle that the run was trained from."
        )
        return section("photos", "The photos", "", missing(what))
    figures = []
    for photo in photos:
        caption = str(photo.get("caption") or photo.get("name", ""))
        picture = embedded_picture(data.bundle_dir, photo.get("preview"), f"Photo of the subject: {caption}")
        figures.append(f'<figure class="photo">{picture}<figcaption dir="auto">{escape(caption)}</figcaption></figure>')
    lead = f"The adapter learned from {'this photo' if len(photos) == 1 else f'these {len(photos)} photos'}."
    return section("photos", "The photos", lead, f'<div class="photos">{"".join(figures)}</div>')


def _pictures(data: ReportInputs) -> str:
    heading, items = "Pictures before and after", dicts(data.pictures.get("items"))
    if not items:
        note = missing("No pictures were made with this adapter yet.", "pocketdit generate", data.run_dir)
        return section("pictures", heading, "", note)
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        by_prompt.setdefault(str(item.get("prompt", "")), []).append(item)
    body = []
    for prompt, pairs in by_prompt.items():
        tag = '<span class="tag">unseen prompt</span>' if pairs[0].get("unseen") is True else ""
        figures = "".join(_pair(data, prompt, item) for item in pairs)
        body.append(f'<h3><bdi>{escape(prompt)}</bdi>{tag}</h3><div class="pairs">{figures}</div>')
    if all(number(item, "similarity_adapter") is None for item in items):
        body.append(missing("Similarity to the photos was not measured.", "pocketdit evaluate", data.run_dir))
    steps, guidance = number(data.pictures, "steps"), number(data.pictures, "guidance")
    lead = "Each pair starts from the same seed: left the base model, right the same model with the adapter. "
    lead += "Similarity tells how close a picture is to the photos; higher is closer."
    lead += "" if steps is None or guidance is None else f" {steps:.0f} sampling steps, guidance {guidance:g}."
    return section("pictures", heading, lead, "".join(body))


def _pair(data: ReportInputs, prompt: str, item: dict[str, Any]) -> str:
    halves, seed = [], item.get("seed", "—")
    for label, css, key in (("Before", "before", "base"), ("After", "after", "adapter")):
        similarity = number(item, f"similarity_{key}")
        picture = embedded_picture(data.run_dir / "pictures", item.get(key), f"{label}, seed {seed}: {prompt}")
        below = "" if similarity is None else f'<span class="similarity">similarity {_fixed(similarity)}</span>'
        below += "" if similarity is None else meter(similarity, css)
        halves.append(f'<div><span class="when {css}">{label}</span>{picture}{below}</div>')
    return f'<figure class="pair"><div>{"".join(halves)}</div><figcaption>Seed {escape(seed)}</figcaption></figure>'


def _loss(data: ReportInputs) -> str:
    losses, known = [number(row, "loss") for row in data.rows], data.column("loss")
    if not known:
        return section("loss", "Loss", "", _no_metrics(data, "loss values"))
    steps = [float(row["step"]) for row in data.rows]
    window = max(5, len(losses) // 20) | 1
    smooth = moving_mean(losses, window)
    usual = sorted(known)[int(0.99 * (len(known) - 1))]
    cap = max(1.15 * usual, *(value for value in smooth if value is not None))
    cap = max(known) if max(known) <= 1.5 * cap else cap  # only real spikes are cut
    num_high = sum(loss > cap for loss in known)
    series = [
        Series(label="one step", points=list(zip(steps, losses, strict=True)), style="dots", color="c1"),
        Series(label=f"mean of {window} steps", points=list(zip(steps, smooth, strict=True)), style="line", color="c1"),
    ]
    held_out = [(float(row["step"]), loss) for row in data.rows if (loss := number(row, "held_out_loss")) is not None]
    if held_out:
        series.append(Series(label="held-out samples", points=held_out, style="line", color="c2"))
    low = min(known) if min(known) > 0.5 * cap else 0.0
    y_label = "loss (mean squared error)"
    chart = line_chart(series, title="Loss over steps", x_label="step", y_label=y_label, y_low=low, y_cap=cap)
    tenth, num_lost = max(1, len(known) // 10), len(losses) - len(known)
    body = plate(
        chart,
        f"First {tenth} steps: mean {fmean(known[:tenth]):.3g}. Last {tenth}: mean {fmean(known[-tenth:]):.3g}.",
        f"Held-out samples: from {held_out[0][1]:.3g} to {held_out[-1][1]:.3g}." if held_out else "",
        f"Higher than the chart, drawn at its top edge: {num_high}." if num_high else "",
        f"Steps left out because their loss was not finite: {num_lost}." if num_lost else "",
    )
    lead = "Every sample has its own noise level, so single values jump; the line shows the trend."
    return section("loss", "Loss", lead, body)


def _memory(data: ReportInputs) -> str:
    def curve(label: str, key: str, style: Any, color: str) -> list[Series]:
        timed = [(seconds, number(row, key)) for row in data.rows if (seconds := number(row, "seconds")) is not None]
        points = [(seconds, None if value is None else value / MIB) for seconds, value in timed]
        is_known = any(value is not None for _, value in points)
        return [Series(label=label, points=points, style=style, color=color)] if is_known else []

    private = curve("private memory now", "private_bytes", "area", "c1")
    private += curve("peak so far", "peak_private_bytes", "steps", "c1")
    mapped = curve("file-backed memory", "file_bytes", "area", "c3")
    if not private:
        return section("memory", "Memory over time", "", _no_metrics(data, "memory values"))
    budget_mib, idle_bytes = number(data.run, "budget_mib"), number(data.run, "idle_private_bytes")
    limit = None if budget_mib is None else Limit(value=budget_mib, label=f"budget {mib_text(budget_mib)}")
    title, x_label = "Private memory over time against the budget", "time (s)"
    chart = line_chart(private, title=title, x_label=x_label, y_label="private memory (MiB)", limit=limit)
    if mapped:
        title, y_label = "File-backed memory over time", "file-backed memory (MiB)"
        chart += line_chart(mapped, title=title, x_label=x_label, y_label=y_label, height=200)
    idle = (
        ""
        if idle_bytes is None
        else f"Private memory counts from the idle process, which holds {size_text(idle_bytes)}."
    )
    lead = "Private memory is what training itself holds, and what the budget limits. File-backed memory is mapped "
    lead += "weights: the system may drop them at any time and read them again."
    return section("memory", "Memory over time", lead, plate(chart, idle))


def _step_time(data: ReportInputs) -> str:
    heading, times_ms = "Where a step's time goes", data.column("step_ms")
    columns = [(name, data.column(f"{name}_ms"), color) for name, color in STEP_PARTS]
    parts = [(name, fmean(column), color) for name, column, color in columns if column]
    known_ms = sum(value for _, value, _ in parts)
    if not times_ms or known_ms <= 0:
        return section("time", heading, "", _no_metrics(data, "step times"))
    parts.append(("other", max(0.0, fmean(times_ms) - known_ms), "c5"))
    chart = stacked_bar(parts, title="Mean time of a step by part, in milliseconds", unit="ms")
    lead = f"Mean of {len(times_ms):,} steps, {format_amount(fmean(times_ms))} ms each. "
    lead += "Backward includes computing each block again, because only block inputs are kept."
    return section("time", heading, lead, plate(chart))


def _patches(data: ReportInputs) -> str:
    heading, name = "Patch sampling", "preview/crops.png"
    if not (data.bundle_dir / name).is_file():
        note = missing(f"The bundle has no picture of its crops ({name}).")
        return section("patches", heading, "", note)
    alt = "Crops of a photo over the timesteps, from small ones at low noise to the whole photo at high noise"
    lead = "Low noise, small crop: there the model learns detail. High noise, nearly the whole photo: there it learns "
    lead += "the layout. All crops are resized to one side, so every sample costs the same."
    return section("patches", heading, lead, f'<div class="plate">{embedded_picture(data.bundle_dir, name, alt)}</div>')


def _settings(data: ReportInputs) -> str:
    run, manifest = data.run, data.manifest
    methods = lookup(manifest, "programs", "methods")
    planned = {name: size_text(number(methods, name, "planned_bytes")) for name in methods or {}}
    versions = {"pocketdit": run.get("version"), "bundle made by": manifest.get("created_by")}
    versions |= {**(run.get("versions") or {}), "run": run.get("schema"), "bundle": manifest.get("schema")}
    groups = (
        ("Run", "as resolved", {**(run.get("settings") or {}), "budget_mib": run.get("budget_mib")}),
        ("Training", "defaults of the bundle", manifest.get("training")),
        ("LoRA", "", manifest.get("lora")),
        ("Cut", "blocks skipped at both ends", manifest.get("cut")),
        ("Base model", "", manifest.get("base")),
        ("Samples", "", manifest.get("samples")),
        ("Export", "", manifest.get("export")),
        ("Programs", "private memory planned for each", planned),
        ("Versions", "", versions),
    )
    body = "".join(details(name, note, values) for name, note, values in groups if values)
    if not manifest:
        body += missing(f"The bundle's settings are not here: {data.bundle_dir} has no readable manifest.json.")
    return section("settings", "Settings", "", body)
