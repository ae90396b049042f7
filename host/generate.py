"""Draws pictures with the base and with the adapter, from the same noise, through diffusers' own pipeline.

Reads a run folder and its bundle's previews, writes `pictures/` and `pictures/pictures.json` into the run folder.
"""

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from host.config import GenerateConfig
from host.evaluate import subject_similarity
from host.models import ModelFolder, PromptStates
from host.models.base import decode_latents
from host.models.folder import load_lora
from host.patches import require_side
from host.residuals import noise_of, processes
from runtime import atomic
from runtime.errors import BundleError
from runtime.manifest import BundleManifest, read_manifest
from runtime.trainer import ADAPTER

MAX_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a run's pictures are drawn from."""

    bundle_dir: Path
    bundle: BundleManifest
    model: ModelFolder
    adapter_path: Path
    prompts: tuple[str, ...]
    image_side: int
    """Pixels."""


def draw(
    model: ModelFolder,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    transformer: Any,
    steps: int,
    guidance: float,
    image_side: int,
    label: str,
) -> list[Image.Image]:
    """Draws one picture per (prompt, seed) pair.

    Args:
        model: The base.
        prompts: N prompts.
        seeds: N seeds; the same seed gives the same starting noise, with and without an adapter.
        transformer: The base, or the base with an adapter loaded.
        steps: Denoising steps.
        guidance: Classifier-free guidance.
        image_side: Pixels.
        label: Of the progress bar.
    """
    encoded = encode_prompts(model, prompts, None)
    noise = starting_noise(model, seeds, image_side)
    latents = denoise(model, transformer, encoded, noise, steps=steps, guidance=guidance, label=label)
    return decode(model.load("vae"), latents)


def compared(run_dir: Path, config: GenerateConfig, models: dict[Any, ModelFolder] | None = None) -> Comparison:
    """Checks a run and what is asked of it; loads no weights.

    Args:
        run_dir: A run with an adapter.
        config: Prompts, seeds and sampler settings.
        models: Models met before, which need not be hashed again; gets this run's.

    Raises:
        ValueError: The run has no adapter, its base model is broken or changed since the export, or the side is unfit.
    """
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8")) if (run_dir / "run.json").is_file() else None
    if run is None:
        raise ValueError(f"{run_dir} is not a run folder. Train first: pocketdit train BUNDLE --run {run_dir}.")
    adapter_path = run_dir / ADAPTER
    if not adapter_path.is_file():
        raise ValueError(f"{run_dir} has no adapter yet (status {run['status']!r}). Resume it with `pocketdit train`.")
    bundle_dir = Path(run["bundle"])
    bundle = read_manifest(bundle_dir)
    models, named = {} if models is None else models, (bundle.base.model, bundle.base.revision, bundle.base.variant)
    if named not in models:
        models[named] = ModelFolder(*named)
    model = models[named]
    side = int(bundle.export["image_side"]) if config.image_side is None else config.image_side
    require_side("image_side", side, model.latent_factor * model.normalized_config.patch_size)
    model.require_whole()
    if model.sha256() != bundle.base.sha256:
        raise BundleError(
            f"{bundle.base.model} is not the model this bundle was cut from: its hash differs. Export again."
        )
    return Comparison(
        bundle_dir=bundle_dir,
        bundle=bundle,
        model=model,
        adapter_path=adapter_path,
        prompts=config.prompts or (bundle.subject.instance_prompt,),
        image_side=side,
    )


def generate(run_dir: Path, config: GenerateConfig) -> dict[str, Any]:
    """Draws the comparison of a run: each prompt and seed by the base and by the adapter.

    Text encoders, transformer and autoencoder are in memory one after the other.

    Args:
        run_dir: A run with an adapter.
        config: Prompts, seeds and sampler settings.

    Returns:
        The content of `pictures.json`; similarities are to the bundle's photos.

    Raises:
        ValueError: As `compared`.
    """
    asked = compared(run_dir, config)
    model, bundle, prompts = asked.model, asked.bundle, asked.prompts
    pairs = [(prompt, seed) for prompt in prompts for seed in config.seeds]
    encoded = encode_prompts(model, [prompt for prompt, _ in pairs], bundle.export.get("prompt_tokens"))
    noise = starting_noise(model, [seed for _, seed in pairs], asked.image_side)
    transformer, latents = model.load("transformer"), {}
    for kind in ("base", "adapter"):
        if kind == "adapter":
            load_lora(model.adapter, transformer, asked.adapter_path)
        label = f"pictures of the {kind}"
        latents[kind] = denoise(
            model, transformer, encoded, noise, steps=config.steps, guidance=config.guidance, label=label
        )
    del transformer
    gc.collect()
    vae = model.load("vae")
    pictures = {kind: decode(vae, made) for kind, made in latents.items()}
    photos = [Image.open(asked.bundle_dir / photo.preview) for photo in bundle.subject.photos]
    similarity = {kind: subject_similarity(images, photos) for kind, images in pictures.items()}
    items = []
    for number, (prompt, seed) in enumerate(pairs):
        item: dict[str, Any] = {"prompt": prompt, "seed": seed, "unseen": prompt not in _taught(bundle)}
        for kind, images in pictures.items():
            name = f"{kind}/p{prompts.index(prompt)}_s{seed}.png"
            with atomic.atomic_path(run_dir / "pictures" / name) as temp:
                images[number].save(temp, format="PNG")
            item |= {kind: name, f"similarity_{kind}": round(float(similarity[kind][number]), 4)}
        items.append(item)
    result = {
        "steps": config.steps,
        "guidance": config.guidance,
        "size": pictures["base"][0].width,
        "items": items,
        "similarity": {kind: round(float(values.mean()), 4) for kind, values in similarity.items()},
    }
    atomic.write_json(run_dir / "pictures" / "pictures.json", result)
    return result


def encode_prompts(
    model: ModelFolder, prompts: Sequence[str], max_tokens: int | None
) -> tuple[PromptStates, PromptStates | None]:
    """States of N prompts, and of no prompt N times where the model takes a negative one."""
    unique = sorted(set(prompts))
    states = model.encode_prompts(unique, max_tokens=max_tokens)[[unique.index(prompt) for prompt in prompts]]
    if not model.adapter.takes_negative(model.normalized_config):
        return states, None
    return states, model.encode_prompts([""], max_tokens=max_tokens, negative=True)[[0] * len(prompts)]


def starting_noise(model: ModelFolder, seeds: Sequence[int], image_side: int) -> Tensor:
    """Noise the pictures of N seeds start from, (N, C, h, w)."""
    side = image_side // model.latent_factor
    return torch.stack([noise_of(seed, (model.normalized_config.num_channels, side, side)) for seed in seeds])


@torch.no_grad()
def denoise(
    model: ModelFolder,
    transformer: Any,
    encoded: tuple[PromptStates, PromptStates | None],
    noise: Tensor,
    *,
    steps: int,
    guidance: float,
    label: str,
) -> Tensor:
    """Latents (N, C, h, w), on the CPU."""
    device = processes().device
    transformer = transformer.to(device)
    parts = []
    for rows in tqdm(_rows(len(noise)), desc=label, leave=False):
        positive, negative = (states[rows].to(device) if states else None for states in encoded)
        assert positive is not None
        latents = model.denoise(transformer, positive, negative, noise[rows].to(device), steps=steps, guidance=guidance)
        parts.append(latents.cpu())
    return torch.cat(parts)


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> list[Image.Image]:
    """Latents (N, C, h, w) to pictures."""
    device = processes().device
    vae = vae.to(device)
    return [
        _picture(pixels) for rows in _rows(len(latents)) for pixels in decode_latents(vae, latents[rows].to(device))
    ]


def _rows(count: int) -> list[list[int]]:
    return [list(range(start, min(start + MAX_BATCH, count))) for start in range(0, count, MAX_BATCH)]


def _taught(bundle: BundleManifest) -> set[str]:
    return {photo.caption for photo in bundle.subject.photos} | {bundle.subject.instance_prompt}


def _picture(pixels: Tensor) -> Image.Image:
    array = ((pixels.permute(1, 2, 0).float().cpu().numpy() + 1) * 127.5).round().astype(np.uint8)
    return Image.fromarray(array)
