"""Evaluates trained runs: subject fidelity, prompt fidelity and drift over subjects, prompts and seeds.

Reads run folders, their bundles and, if given, a data set as published. Writes `evaluation.json`, `evaluation.html` and
`pictures/*.png` into one folder; started again, it draws only the pictures it has not yet.
Command: `pocketdit evaluate runs/dog runs/cat --dataset dreambooth/dataset`.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from host import evaluate as scores
from host.config import GenerateConfig
from host.evaluation.pictures import Artist, Order, PictureStore, with_adapter
from host.evaluation.prompts import Prompt, drift_prompts, subject_prompts
from host.evaluation.rows import MEASURES, score_backgrounds, score_features, summaries
from host.features import LITE2, Features, load_features
from host.generate import Comparison, compared
from host.models import EMBEDDED, ModelFolder
from host.subjects import PLACEHOLDER, Subject, match_subject, read_dataset
from host.tiny_base.backgrounds import BackgroundClassifier, backgrounds_of, load_classifier
from runtime import __version__, atomic

logger = logging.getLogger(__name__)

SCHEMA = "pocketdit.evaluation/1"
FILE_NAME, PICTURES = "evaluation.json", "pictures"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """What is asked for."""

    run_dirs: tuple[Path, ...]
    """One run is one subject."""
    output_dir: Path
    config: GenerateConfig = field(default_factory=GenerateConfig)
    """Seeds, steps, guidance and side; its prompts where nothing else gives any."""
    dataset_dir: Path | None = None
    """DreamBooth or CustomConcept101 as published."""
    prompts: tuple[str, ...] | None = None
    """In place of the data set's or the settings'."""
    drift_prompts: tuple[str, ...] | None = None
    features: tuple[str, ...] = (LITE2,)
    """Names of feature models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedRun:
    """One run: who draws what, and what it is compared with."""

    name: str
    subject: str
    """Of the data set, else the run's name; runs on the same photos share it."""
    class_words: str
    asked: Comparison
    artist: Artist
    prompts: tuple[Prompt, ...]
    drift_prompts: tuple[str, ...]
    photos: tuple[Path, ...]
    photos_from: str


class Evaluation:
    """A checked request; nothing is drawn or written before `run`."""

    def __init__(self, request: EvaluationRequest) -> None:
        """Checks runs, data set and feature models.

        Raises:
            ValueError: A run has no adapter, the data set is not as published or has not its photos, a feature model
                cannot be had, or prompts for drift have a placeholder.
        """
        self.request = request
        if any(PLACEHOLDER in prompt for prompt in request.drift_prompts or ()):
            raise ValueError(f"drift prompts: got {PLACEHOLDER}, expected prompts that do not name the subject.")
        subjects = read_dataset(request.dataset_dir) if request.dataset_dir else []
        if request.config.prompts and (request.prompts or subjects):
            logger.warning("generate.prompts is ignored: the prompts come from %s.", _prompt_source(request))
        models: dict[Any, ModelFolder] = {}
        folders = list(dict.fromkeys(path.resolve() for path in request.run_dirs))
        if not folders:
            raise ValueError("runs: got none, expected at least one run folder. Train first with `pocketdit train`.")
        asked = [compared(path, request.config, models) for path in folders]
        self.runs = _runs(folders, asked, request, subjects)
        self.features: list[Features] = [load_features(name) for name in dict.fromkeys(request.features)]
        self.store = PictureStore(request.output_dir / PICTURES, request.config)

    @cached_property
    def _tiny(self) -> set[str]:
        """Names of the runs on the embedded base."""
        return {run.name for run in self.runs if run.artist.model.name == EMBEDDED}

    @cached_property
    def orders(self) -> list[Order]:
        """Every picture that is compared, the base's too."""
        found = []
        for run in self.runs:
            prompts = [*(prompt.drawn for prompt in run.prompts), *run.drift_prompts]
            for artist in (run.artist.base(), run.artist):
                found += [Order(artist=artist, prompt=p, seed=s) for p in prompts for s in self.request.config.seeds]
        return found

    def run(self, say: Callable[..., None] = print) -> dict[str, Any]:
        """Draws what is missing, scores everything and writes `evaluation.json`.

        Args:
            say: Gets a line now and then.

        Returns:
            The content of `evaluation.json`.
        """
        missing = self.store.missing(self.orders)
        there = len({self.store.path(order) for order in self.orders}) - len(missing)
        say(f"pictures: {len(missing)} to draw, {there} there already")
        self.store.draw(missing)
        rows, drifted = self._rows(), self._drift_rows()
        folder, photos = self.request.output_dir, {run.name: run.photos for run in self.runs}
        metrics = []
        for features in self.features:
            metrics += score_features(features, folder, rows, drifted, photos)
        classifier = self._classifier(rows)
        if classifier is not None:
            metrics += score_backgrounds(classifier, folder, [row for row in rows if row["run"] in self._tiny])
        metrics.sort(key=lambda metric: MEASURES.index(metric["measure"]))
        result = {
            "schema": SCHEMA,
            "version": __version__,
            "settings": {
                **dataclasses.asdict(self.request.config),
                "prompts": _prompt_source(self.request),
                "dataset": str(self.request.dataset_dir) if self.request.dataset_dir else None,
            },
            "intervals": {
                "level": scores.LEVEL,
                "method": "cluster bootstrap, subjects then their pictures, expanded percentiles",
                "resamples": scores.RESAMPLES,
                "seed": 0,
            },
            "features": [{"name": f.name, "title": f.title, "sha256": f.sha256()} for f in self.features],
            "backgrounds": None
            if classifier is None
            else {"accuracy": round(classifier.accuracy, 4), "tested": classifier.tested},
            "metrics": metrics,
            "runs": [_run_record(run) for run in self.runs],
            "summary": summaries(metrics, rows, drifted),
            "by_subject": {
                subject: summaries(metrics, *(_of(subject, each) for each in (rows, drifted)))
                for subject in dict.fromkeys(run.subject for run in self.runs)
            },
            "pictures": rows,
            "drift": drifted,
        }
        atomic.write_json(self.request.output_dir / FILE_NAME, result)
        return result

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for run in self.runs:
            subject = run.asked.bundle.subject
            taught = {photo.caption for photo in subject.photos} | {subject.instance_prompt}
            for prompt in run.prompts:
                for seed in self.request.config.seeds:
                    row: dict[str, Any] = {"run": run.name, "subject": run.subject}
                    row |= {"prompt": prompt.drawn, "scored": prompt.scored, "seed": seed}
                    row |= {"unseen": prompt.drawn not in taught}
                    rows.append(row | self._names(run, prompt.drawn, seed) | {"scores": {}})
        return rows

    def _drift_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "run": run.name,
                "subject": run.subject,
                "prompt": prompt,
                "seed": seed,
                **self._names(run, prompt, seed),
                "scores": {},
            }
            for run in self.runs
            for prompt in run.drift_prompts
            for seed in self.request.config.seeds
        ]

    def _names(self, run: EvaluatedRun, prompt: str, seed: int) -> dict[str, str]:
        """Paths of a pair, as evaluation.json has them."""
        artists = {"base": run.artist.base(), "adapter": run.artist}
        return {
            kind: f"{PICTURES}/{self.store.path(Order(artist=artist, prompt=prompt, seed=seed)).name}"
            for kind, artist in artists.items()
        }

    def _classifier(self, rows: list[dict[str, Any]]) -> BackgroundClassifier | None:
        """Of backgrounds, where a prompt to the embedded base names one."""
        if not any(row["run"] in self._tiny and backgrounds_of([row["prompt"]])[0] for row in rows):
            return None
        try:
            return load_classifier()
        except ValueError as error:
            logger.warning("the backgrounds named in the prompts are not scored: %s", error)
            return None


def _runs(
    folders: Sequence[Path], asked: Sequence[Comparison], request: EvaluationRequest, subjects: Sequence[Subject]
) -> list[EvaluatedRun]:
    names = [folder.name for folder in folders]
    names = [
        name if names.count(name) == 1 else f"{folder.parent.name}/{name}"
        for name, folder in zip(names, folders, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    by_photos: dict[frozenset[str], str] = {}
    runs = []
    for name, comparison in zip(names, asked, strict=True):
        taught, model = comparison.bundle.subject, comparison.model
        hashes = frozenset(photo.sha256 for photo in taught.photos)
        subject = match_subject(subjects, hashes, name) if subjects else None
        templates = request.prompts or (subject.prompts if subject else comparison.prompts)
        tiny = model.name == EMBEDDED
        previews = tuple(comparison.bundle_dir / photo.preview for photo in taught.photos)
        runs.append(
            EvaluatedRun(
                name=name,
                subject=subject.name if subject else by_photos.setdefault(hashes, name),
                class_words=subject.class_words if subject else "",
                asked=comparison,
                artist=with_adapter(
                    model,
                    comparison.adapter_path,
                    comparison.image_side,
                    comparison.bundle.export.get("prompt_tokens"),
                ),
                prompts=subject_prompts(templates, taught.instance_prompt, subject),
                drift_prompts=request.drift_prompts
                or drift_prompts(taught.instance_prompt, subjects, subject, tiny=tiny),
                photos=tuple(subject.photos.values()) if subject else previews,
                photos_from="data set" if subject else "bundle",
            )
        )
    return runs


def _prompt_source(request: EvaluationRequest) -> str:
    if request.prompts:
        return "--prompts"
    if request.dataset_dir:
        return "the data set"
    return "the settings" if request.config.prompts else "the instance prompts"


def _of(subject: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["subject"] == subject]


def _run_record(run: EvaluatedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "subject": run.subject,
        "class": run.class_words,
        "bundle": str(run.asked.bundle_dir),
        "model": run.artist.model.name,
        "model_sha256": run.artist.model.sha256(),
        "adapter_sha256": run.artist.adapter_sha256,
        "image_side": run.artist.image_side,
        "instance_prompt": run.asked.bundle.subject.instance_prompt,
        "photos": [str(path) for path in run.photos],
        "photos_from": run.photos_from,
        "prompts": [prompt.drawn for prompt in run.prompts],
        "drift_prompts": list(run.drift_prompts),
    }
