"""Scores of the study's pictures: subject, prompt, drift. Reads a job's pictures, writes `scores.json` beside them."""

import json
import math
from functools import cache

import numpy as np
from PIL import Image

from benchmarks.study_jobs import PROMPT_BACKGROUNDS, Job, base_job
from host.evaluate import drift, subject_fidelity
from host.features import lite2_features
from host.tiny_base import world
from host.tiny_base.backgrounds import background_scores, load_classifier
from host.tiny_base.recognise import REFERENCE_SCALE
from runtime import atomic

Scores = dict[str, list[float]]
"""`subject`, `recognised`, `prompt` of each picture of the subject; `drift` of each without it."""


def scores_of(job: Job) -> Scores:
    """Scores of a finished job; those of drift need the base's job.

    - `subject`: mean cosine of Lite2 features to the subject's photos.
    - `recognised`: 1 where, among all labels of the world on the prompt's background, the subject's own is the nearest.
    - `prompt`: probability of the background the prompt names.
    - `drift`: 1 - cosine to the base's picture from the same noise, on prompts without the subject.
    """
    path = job.dir / "scores.json"
    if path.is_file():
        return json.loads(path.read_text())
    pictures, backgrounds = [], []
    for number, background in enumerate(PROMPT_BACKGROUNDS):
        for seed in job.seeds:
            pictures.append(Image.open(job.dir / f"p{number}_s{seed}.png"))
            backgrounds.append(background)
    features = lite2_features(pictures)
    photos = lite2_features([Image.open(path) for path in sorted(job.photos_dir.glob("*.jpg"))])
    named, _ = background_scores(load_classifier(), pictures, backgrounds)
    found = {
        "subject": subject_fidelity(features, photos),
        "recognised": np.array(
            [_nearest(row, background) == job.label for row, background in zip(features, backgrounds, strict=True)]
        ),
        "prompt": named,
    }
    if job.drift:
        names = [f"d{i}_s{seed}.png" for i in range(len(PROMPT_BACKGROUNDS)) for seed in job.seeds]
        here, there = (
            lite2_features([Image.open(folder / name) for name in names]) for folder in (base_job(job).dir, job.dir)
        )
        found["drift"] = drift(here, there)
    scores = {name: [round(float(value), 5) for value in values] for name, values in found.items()}
    atomic.write_json(path, scores)
    return scores


@cache
def _references(background: str) -> tuple[list[str], np.ndarray]:
    """Every label of the world, held-out ones too, on one background."""
    labels = [*world.vocabulary(), *world.holdout()]
    drawn = world.draw_background(background, np.random.default_rng(0))
    pictures = [world.compose(emoji.image, drawn, REFERENCE_SCALE, (0, 0)) for emoji in world.load_emoji(labels)]
    return labels, lite2_features(pictures)


def _nearest(features: np.ndarray, background: str) -> str:
    labels, references = _references(background)
    return labels[int(np.argmax(references @ features))]


def tuning_score(jobs: list[Job]) -> float:
    """What the search maximises: the geometric mean of subject and prompt fidelity, over some subjects."""
    found = [scores_of(job) for job in jobs]
    means = [float(np.mean([value for scores in found for value in scores[name]])) for name in ("subject", "prompt")]
    return math.sqrt(max(0.0, means[0]) * max(0.0, means[1]))
