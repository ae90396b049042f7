"""Finds the blocks a model can do without: fine-tunes it on subjects, masks the prompt in runs of blocks, compares pictures.

Reads a model and folders of photos, one a subject. Every fine-tuning and every set of pictures is a stage of the cache, so
that a run that was stopped goes on and a second one draws nothing. What comes out is a `BlockProfile`
(host/block_profile.py). One command: `pocketdit profile --photos photos/dog --photos photos/cat`.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from host import patches, residuals, schedule
from host.baselines import base as baselines
from host.baselines import lora
from host.block_profile import (
    DECIMALS,
    SHARES,
    THIS,
    Agreement,
    BlockProfile,
    Cost,
    Curves,
    agreement,
    architecture_of,
    decide,
)
from host.cache import cached_stage
from host.config import Config
from host.cut import DEFAULT_SHARE, shipped_profiles
from host.features import LITE2, Features, load_features
from host.generate import decode, denoise, encode_prompts, starting_noise
from host.models import ModelFolder, PromptStates
from host.models.folder import trim_heap
from host.plan import skipped_of_share
from runtime import __version__
from runtime.bundle import sha256_file
from runtime.schema import encode

WINDOW = 3
"""Blocks of the sliding window; fewer where the model has fewer."""
PLACEHOLDER = "{}"
"""Stands in prompts for the name of the subject's folder."""
PROMPTS_ONLY = "prompts"
ADAPTER, FEATURES, SECONDS = "adapter.safetensors", "features.npy", "seconds.json"
# Settings of an export that neither the fine-tuning nor the pictures depend on.
IRRELEVANT = (
    *("model", "cut", "skip", "patch_policy", "patch_side", "sample_dtype", "weights", "budget", "backend"),
    *("batch_size", "on_bad_photo"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to profile, and how."""

    config: Config
    """[export] and [train] say how the model is fine-tuned, [generate] what is drawn; `{}` in prompts is the subject."""
    photos_dirs: tuple[Path, ...]
    """A subject each."""
    quick: bool = False
    """Masks the base, without fine-tuning."""
    features: str = LITE2
    """See `host.features.load_features`."""
    share: float = DEFAULT_SHARE
    """Share of the blocks to skip, whose cut is shown in pictures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A subject, and what is drawn of it."""

    name: str
    prompts: tuple[str, ...]
    task: baselines.Task | None
    """None without photos."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A picture to look at."""

    label: str
    path: Path


class Selection:
    """One profile, from checked settings to its curves."""

    def __init__(self, request: Request) -> None:
        """Checks everything that can be checked without long work.

        Raises:
            ValueError: Photos, model, prompts, sides or features are unfit; nothing was written.
        """
        export, drawn = request.config.export, request.config.generate
        self.request, self.drawn = request, drawn
        skipped_of_share(1, request.share)  # refuses what is none
        self.model = ModelFolder(export.model, export.revision, export.variant)
        self.skeleton = self.model.skeleton()
        self.num_blocks = len(self.model.adapter.blocks(self.skeleton))
        if self.num_blocks < 2:
            raise ValueError(f"{export.model} has {self.num_blocks} block, a profile needs at least 2.")
        config, factor = self.model.normalized_config, self.model.latent_factor
        self.image_side = drawn.image_side or export.image_side or config.image_size * factor
        patches.require_side("image_side", self.image_side, factor * config.patch_size)
        self.model.require_whole()
        self.features: Features = load_features(request.features)
        self.features_sha256 = self.features.sha256()
        self.window = min(WINDOW, self.num_blocks)
        self.subjects = self._subjects()
        texts = [prompt for subject in self.subjects for prompt in subject.prompts]
        self.model.encode_prompts(texts, max_tokens=export.prompt_tokens, blank=True)  # refuses long ones
        self._sources = _hashes(*self.model.adapter_files())

    def _subjects(self) -> list[Subject]:
        request, found = self.request, []
        names = [folder.resolve().name for folder in request.photos_dirs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"photos: got two folders named {twice[0]!r}, expected different subjects; rename one.")
        if not names and not request.quick:
            raise ValueError("photos: got none, expected a folder a subject. Give --photos, or --quick with --prompt.")
        for name, folder in zip(names, request.photos_dirs, strict=True):
            export = request.config.export
            prompt = export.prompt.replace(PLACEHOLDER, name) if export.prompt else None
            config = replace(request.config, export=replace(export, prompt=prompt, cut=(0, 0), budget=None))
            task = baselines.Task(config=config, photos_dir=folder, words=name, class_words=name)
            captions = [photo.caption for photo in _exporter(task).photos]
            prompts = [text.replace(PLACEHOLDER, name) for text in self.drawn.prompts] or captions
            found.append(Subject(name=name, prompts=tuple(dict.fromkeys(prompts)), task=task))
        if not names:
            texts = self.drawn.prompts
            if not texts or any(PLACEHOLDER in text for text in texts):
                raise ValueError(
                    f"prompt: got {', '.join(texts) or 'none'}, expected whole prompts where there are no photos. Give "
                    f"--prompt without {PLACEHOLDER}, or --photos."
                )
            found.append(Subject(name=PROMPTS_ONLY, prompts=tuple(dict.fromkeys(texts)), task=None))
        return found

    def described(self) -> dict[str, tuple[str, ...]]:
        """What is drawn of each subject."""
        return {subject.name: subject.prompts for subject in self.subjects}

    def num_pictures(self) -> int:
        """Pictures a whole run draws."""
        count = self._each * len(self._spans)
        return count if self.request.quick else count + self._each * len(curve_spans(self.num_blocks))

    @property
    def _each(self) -> int:
        """Pictures for each span, over all subjects."""
        return sum(len(subject.prompts) for subject in self.subjects) * len(self.drawn.seeds)

    @property
    def _spans(self) -> list[range]:
        return all_spans(self.num_blocks, self.window)

    def run(self, say: Callable[[str], None] = lambda text: None) -> tuple[BlockProfile, list[Example]]:
        """Makes the profile.

        Args:
            say: Told what was done.

        Returns:
            The profile, and pictures of the first subject with the blocks of each cut masked.
        """
        quick, spans, base_spans = self.request.quick, self._spans, curve_spans(self.num_blocks)
        pictures: list[Curves] = []
        base_pictures: list[Curves] = []
        examples: list[Example] = []
        fine_tuning_s = drawing_s = features_s = quick_s = 0.0
        for subject in self.subjects:
            adapter_dir = None if quick else self._fine_tuned(subject)
            if adapter_dir is not None:
                fine_tuning_s += _seconds(adapter_dir)
                say(f"{subject.name}: fine-tuned in {_seconds(adapter_dir):.0f} s")
            gallery = Gallery(self, subject, adapter_dir)
            pictures += gallery.curves(spans, "base" if quick else "fine-tuned")
            drawing_s, features_s = drawing_s + gallery.drawing_s, features_s + gallery.features_s
            examples = examples or self._examples(gallery, pictures)
            gallery.close()
            say(f"{subject.name}: {gallery.count} pictures in {gallery.drawing_s + gallery.features_s:.0f} s")
            if not quick:
                base = Gallery(self, subject, None)
                base_pictures += base.curves(base_spans, "base")
                quick_s += base.drawing_s + base.features_s
                base.close()
                say(f"{subject.name}: {base.count} pictures of the base in {base.drawing_s + base.features_s:.0f} s")
        cost = Cost(
            subjects=len(self.subjects),
            pictures=self._each * len(spans),
            fine_tuning_s=round(fine_tuning_s, 1),
            drawing_s=round(drawing_s, 1),
            features_s=round(features_s, 1),
            quick_pictures=0 if quick else self._each * len(base_spans),
            quick_s=round(quick_s, 1),
        )
        return self._profile(pictures, base_pictures, cost), examples

    def _profile(self, pictures: Sequence[Curves], base_pictures: Sequence[Curves], cost: Cost) -> BlockProfile:
        config = self.request.config
        settings: dict[str, Any] = {"generate": encode(self.drawn) | {"image_side": self.image_side}}
        settings["generate"]["prompts"] = list(self.drawn.prompts) or "the photos' captions"
        if not self.request.quick:
            kept = ("samples", "sigma_distribution", "sigma_shift", "lora_rank", "lora_alpha", "lora_targets", "seed")
            settings |= {"train": encode(config.train)}
            settings |= {"export": {name: value for name, value in encode(config.export).items() if name in kept}}
        return BlockProfile(
            created_by=f"pocketdit {__version__}",
            source="measured",
            mode="quick" if self.request.quick else "full",
            model=self.model.name,
            architecture=architecture_of(self.skeleton),
            transformer_sha256=self.model.sha256("transformer"),
            num_blocks=self.num_blocks,
            features=self.features.name,
            window=self.window,
            cuts=tuple(decide(pictures, skipped_of_share(self.num_blocks, share), share) for share in SHARES),
            agreement=self._agreement(pictures, base_pictures),
            cost=cost,
            settings=settings | {"threads": torch.get_num_threads()},
            pictures=tuple(pictures),
            quick_pictures=tuple(base_pictures),
        )

    def _agreement(self, pictures: Sequence[Curves], base_pictures: Sequence[Curves]) -> Agreement | None:
        """Of base and fine-tuned model; a quick profile is held against the shipped one of this model, if there is one."""
        if base_pictures:
            return agreement(pictures, base_pictures, THIS)
        for name, known in shipped_profiles().items():
            if known.mode == "full" and known.transformer_sha256 == self.model.sha256("transformer"):
                return agreement(known.pictures, pictures, name)
        return None

    def _examples(self, gallery: "Gallery", pictures: Sequence[Curves]) -> list[Example]:
        shown = [Example(label="nothing masked", path=gallery.pictures(range(0))[0])]
        for share in sorted({*SHARES, self.request.share}):
            head, tail = decide(pictures, skipped_of_share(self.num_blocks, share), share).cut
            spans = {f"first {head} masked": range(head), f"last {tail} masked": _last(self.num_blocks, tail)}
            shown += [Example(label=label, path=gallery.pictures(span)[0]) for label, span in spans.items() if span]
        return list({example.label: example for example in shown}.values())

    def _fine_tuned(self, subject: Subject) -> Path:
        """The folder of the LoRA of a subject, on all blocks."""
        task = subject.task
        assert task is not None

        def build(folder: Path) -> None:
            with _timed(folder):
                trained = lora.Lora(policy="full").train(task, folder)
                save_file({name: value.contiguous() for name, value in trained.tensors.items()}, folder / ADAPTER)
                del trained
                _free()

        return cached_stage("profile-adapters", self._adapter_key(task), build)[0]

    def _adapter_key(self, task: baselines.Task) -> dict[str, Any]:
        settings = {name: value for name, value in encode(task.config.export).items() if name not in IRRELEVANT}
        sources = (lora, baselines, residuals, patches, schedule)
        return {
            "model": self.model.sha256(),
            "photos": [[photo.name, photo.sha256, photo.caption] for photo in _exporter(task).photos],
            "export": settings,
            "train": encode(task.training),
            "sources": _hashes(*(str(module.__file__) for module in sources)) | self._sources,
            "version": __version__,
        }

    def picture_key(self, subject: Subject, adapter_dir: Path | None, span: range) -> dict[str, Any]:
        """What one set of pictures depends on; the name of the adapter's folder is the hash of what that depends on."""
        return {
            "model": self.model.sha256(),
            "adapter": adapter_dir.name if adapter_dir else None,
            "masked": list(span),
            "prompts": list(subject.prompts),
            "drawn": encode(replace(self.drawn, prompts=())) | {"image_side": self.image_side},
            "prompt_tokens": self.request.config.export.prompt_tokens,
            "sources": self._sources,
            "version": __version__,
        }

    def encoded(self, prompts: Sequence[str]) -> tuple[PromptStates, PromptStates | None]:
        """States of N prompts, and of no prompt N times where the model takes a negative one."""
        texts, positive, negative = self._encoded
        rows = [texts.index(prompt) for prompt in prompts]
        return positive[rows], negative[rows] if negative else None

    @cached_property
    def _encoded(self) -> tuple[list[str], PromptStates, PromptStates | None]:
        texts = sorted({prompt for subject in self.subjects for prompt in subject.prompts})
        return texts, *encode_prompts(self.model, texts, self.request.config.export.prompt_tokens)

    @cached_property
    def vae(self) -> Any:
        """The autoencoder."""
        return self.model.load("vae")


class Gallery:
    """The pictures of one subject by one transformer, with spans of blocks masked."""

    def __init__(self, selection: Selection, subject: Subject, adapter_dir: Path | None) -> None:
        """Loads nothing yet; `adapter_dir` has the LoRA, None is the base."""
        self._selection, self._subject, self._adapter_dir = selection, subject, adapter_dir
        self._pairs = [(prompt, seed) for prompt in subject.prompts for seed in selection.drawn.seeds]
        self.count, self.drawing_s, self.features_s = 0, 0.0, 0.0

    def curves(self, spans: Sequence[range], label: str) -> list[Curves]:
        """Draws what the spans need and says what masking them did to each picture."""
        num_blocks, window = self._selection.num_blocks, self._selection.window
        features = {
            span: self._features(span) for span in tqdm(spans, desc=f"{self._subject.name}, {label}", leave=False)
        }
        unmasked = features[range(0)]
        # Rounding may leave a hair below zero where nothing changed.
        changes = {span: np.maximum(1 - (made * unmasked).sum(1), 0).round(DECIMALS) for span, made in features.items()}

        def values(row: int, wanted: Sequence[range]) -> tuple[float, ...]:
            return tuple(float(changes[span][row]) for span in wanted if span in changes)

        singles, windows = (
            slid(num_blocks, size) if set(slid(num_blocks, size)) <= set(spans) else [] for size in (1, window)
        )
        return [
            Curves(
                subject=self._subject.name,
                prompt=prompt,
                seed=seed,
                first=values(row, [range(n) for n in range(num_blocks)]),
                last=values(row, [_last(num_blocks, m) for m in range(num_blocks)]),
                single=values(row, singles),
                window=values(row, windows),
            )
            for row, (prompt, seed) in enumerate(self._pairs)
        ]

    def pictures(self, span: range) -> list[Path]:
        """Files of the pictures with the blocks of a span masked, drawn if need be."""
        return sorted(self._picture_stage(span)[0].glob("*.png"))

    def close(self) -> None:
        """Frees the transformer."""
        self.__dict__.pop("_transformer", None)
        _free()

    def _picture_stage(self, span: range) -> tuple[Path, dict[str, Any]]:
        key = self._selection.picture_key(self._subject, self._adapter_dir, span)

        def build(folder: Path) -> None:
            transformer = self._transformer
            with _timed(folder):
                for number, picture in enumerate(self._draw(transformer, span)):
                    picture.save(folder / f"{number:04d}.png")

        return cached_stage("profile-pictures", key, build)[0], key

    def _features(self, span: range) -> np.ndarray:
        """(N, D), L2-normalised."""
        features = self._selection.features
        folder, key = self._picture_stage(span)

        def build(made: Path) -> None:
            with _timed(made):
                pictures = [Image.open(path).convert("RGB") for path in sorted(folder.glob("*.png"))]
                np.save(made / FEATURES, features.images(pictures))

        made, _ = cached_stage("profile-features", key | {"features": self._selection.features_sha256}, build)
        self.count += len(self._pairs)
        self.drawing_s += _seconds(folder)
        self.features_s += _seconds(made)
        return np.load(made / FEATURES)

    @cached_property
    def _transformer(self) -> Any:
        transformer = self._selection.model.load("transformer")
        if self._adapter_dir is not None:
            export = self._selection.request.config.export
            fold_lora(transformer, load_file(self._adapter_dir / ADAPTER), export.lora_alpha / export.lora_rank)
        return transformer

    def _draw(self, transformer: Any, span: range) -> list[Image.Image]:
        selection = self._selection
        model, drawn = selection.model, selection.drawn
        encoded = selection.encoded([prompt for prompt, _ in self._pairs])
        noise = starting_noise(model, [seed for _, seed in self._pairs], selection.image_side)
        with model.adapter.mask_text(transformer, span):
            latents = denoise(
                model,
                transformer,
                encoded,
                noise,
                steps=drawn.steps,
                guidance=drawn.guidance,
                label=f"blocks {span.start} to {span.stop - 1} masked" if span else "unmasked",
            )
        return decode(selection.vae, latents)


def curve_spans(num_blocks: int) -> list[range]:
    """The blocks masked for the curves: none, the first n, the last m."""
    spans = [range(n) for n in range(num_blocks)] + [_last(num_blocks, m) for m in range(num_blocks)]
    return list(dict.fromkeys(spans))


def all_spans(num_blocks: int, window: int) -> list[range]:
    """These, and single blocks and windows where they are none of these."""
    return list(dict.fromkeys([*curve_spans(num_blocks), *slid(num_blocks, 1), *slid(num_blocks, window)]))


def slid(num_blocks: int, size: int) -> list[range]:
    """All runs of `size` blocks."""
    return [range(start, start + size) for start in range(num_blocks - size + 1)]


def _last(num_blocks: int, count: int) -> range:
    return range(num_blocks - count, num_blocks)


@torch.no_grad()
def fold_lora(transformer: Any, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Adds LoRA to the weights it belongs to: the same pictures up to rounding, at the base's cost.

    Args:
        transformer: Of diffusers, changed in place.
        tensors: `<module>.lora_A.weight` and `.lora_B.weight`, of linear layers and 1x1 convolutions.
        scale: alpha / rank.
    """
    for name, down in tensors.items():
        if (path := name.removesuffix(".lora_A.weight")) != name:
            weight, up = transformer.get_submodule(path).weight, tensors[f"{path}.lora_B.weight"]
            weight += (scale * up.flatten(1) @ down.flatten(1)).view_as(weight).to(weight.device)


def _exporter(task: baselines.Task) -> Any:
    return task.exporter(Path("unwritten"), patch_policy="full", patch_side=None, cut=(0, 0))


def _hashes(*paths: str) -> dict[str, str]:
    return {Path(path).name: sha256_file(Path(path)) for path in paths}


@contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Leaves the seconds spent inside in a stage's folder, so that they are known when it comes from the cache."""
    start = time.perf_counter()
    yield
    (folder / SECONDS).write_text(json.dumps(time.perf_counter() - start))


def _seconds(folder: Path) -> float:
    return float(json.loads((folder / SECONDS).read_text()))


def _free() -> None:
    gc.collect()
    trim_heap()
