"""The rows of an evaluation, one for each prompt and seed of a run: their scores, and the summaries of these.

Reads pictures and photos, adds to the rows of `evaluation.json`. A row has the paths of its two pictures under `base` and
`adapter`; `scores` gets an entry a metric: a pair, or for drift one number.
Command: `pocketdit evaluate RUN`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from host import evaluate as scores
from host.decode import decode
from host.features import Features
from host.tiny_base.backgrounds import BackgroundClassifier, background_scores, backgrounds_of

Row = dict[str, Any]
MEASURES = ("subject", "prompt", "drift")
KINDS = ("base", "adapter")
BACKGROUND, BACKGROUND_RIGHT = "prompt:background", "prompt:background-right"
CHUNK = 64
"""Pictures in memory at a time."""


def score_features(
    features: Features, folder: Path, rows: Sequence[Row], drifted: Sequence[Row], photos: Mapping[str, Sequence[Path]]
) -> list[dict[str, Any]]:
    """Adds the scores of one feature model to the rows.

    Args:
        features: The model.
        folder: What the pictures' paths are relative to.
        rows: Of the subject's prompts.
        drifted: Of the prompts for drift.
        photos: Of the subject, by the run's name.

    Returns:
        The metrics it measured: key in `scores`, measure, title, source, and whether higher is better.

    Raises:
        ValueError: A photo cannot be read, or the model cannot be loaded.
    """
    names = list(dict.fromkeys(row[kind] for row in [*rows, *drifted] for kind in KINDS))
    vectors = _picture_features(features, folder, names)
    texts = list(dict.fromkeys(row["scored"] for row in rows)) if features.reads_text else []
    read = dict(zip(texts, features.texts(texts), strict=True)) if texts else {}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        of_photos = features.images([_photo(path) for path in photos[run]])
        of_texts = np.stack([read[row["scored"]] for row in own]) if texts else None
        for kind in KINDS:
            of_pictures = np.stack([vectors[row[kind]] for row in own])
            for measure, values in scores.picture_scores(of_pictures, of_photos, of_texts).items():
                _add(own, f"{measure}:{features.name}", values, kind)
    base, adapter = (np.stack([vectors[row[kind]] for row in drifted]) for kind in KINDS)
    _add(drifted, f"drift:{features.name}", scores.drift(base, adapter))
    titles = {"subject": "CLIP-I", "prompt": "CLIP-T", "drift": "CLIP-I"} if features.reads_text else {}
    measures = MEASURES if features.reads_text else ("subject", "drift")
    return [
        _metric(f"{measure}:{features.name}", measure, titles.get(measure, features.title), features.name)
        for measure in measures
    ]


def score_backgrounds(classifier: BackgroundClassifier, folder: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Adds how well pictures of the embedded base show the backgrounds that their prompts name; other rows get nothing."""
    named = backgrounds_of([row["prompt"] for row in rows])
    own = [row for row, name in zip(rows, named, strict=True) if name]
    backgrounds = [name for name in named if name]
    for kind in KINDS:
        probabilities, right = background_scores(classifier, [_open(folder / row[kind]) for row in own], backgrounds)
        _add(own, BACKGROUND, probabilities, kind)
        _add(own, BACKGROUND_RIGHT, right, kind)
    source = f"one of 16; {classifier.accuracy:.1%} right on held-out labels"
    return [
        _metric(BACKGROUND, "prompt", "background, probability", source),
        _metric(BACKGROUND_RIGHT, "prompt", "background, share right", source),
    ]


def summaries(
    metrics: Sequence[dict[str, Any]], rows: Sequence[Row], drifted: Sequence[Row]
) -> dict[str, dict[str, Any]]:
    """Means with intervals by the metric's key; of a pair `base`, `adapter` and `difference`, of drift `adapter`."""
    made: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        key, is_drift = metric["key"], metric["measure"] == "drift"
        own = [row for row in (drifted if is_drift else rows) if key in row["scores"]]
        if not own:
            continue
        values, subjects = [row["scores"][key] for row in own], [row["subject"] for row in own]
        found = (
            {"adapter": scores.summarise(values, subjects)} if is_drift else scores.summarise_pairs(values, subjects)
        )
        made[key] = {kind: _rounded(summary) for kind, summary in found.items()}
    return made


def _picture_features(features: Features, folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    vectors = []
    for start in tqdm(range(0, len(names), CHUNK), desc=f"features {features.title}", leave=False):
        vectors.append(features.images([_open(folder / name) for name in names[start : start + CHUNK]]))
    return dict(zip(names, np.concatenate(vectors), strict=True))


def _metric(key: str, measure: str, title: str, source: str) -> dict[str, Any]:
    return {"key": key, "measure": measure, "title": title, "source": source, "higher_is_better": measure != "drift"}


def _add(rows: Sequence[Row], key: str, values: np.ndarray, kind: str | None = None) -> None:
    for row, value in zip(rows, values, strict=True):
        number = round(float(value), 5)
        if kind is None:
            row["scores"][key] = number
        else:
            row["scores"].setdefault(key, {})[kind] = number


def _rounded(summary: scores.Summary) -> dict[str, Any]:
    values = dataclasses.asdict(summary)
    return values | {name: round(values[name], 5) for name in ("mean", "low", "high")}


def _photo(path: Path) -> Image.Image:
    try:
        return decode(path, path.read_bytes()).image
    except (OSError, ValueError) as error:
        raise ValueError(
            f"photo {path} cannot be read ({error}). Export the bundle, or get the data set, again."
        ) from None


def _open(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGB")
