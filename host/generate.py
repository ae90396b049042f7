"""Draws pictures with the base and with the adapter, from the same noise, through diffusers' own pipeline.

Reads a run folder and its bundle's previews, writes `pictures/` and `pictures/pictures.json` into the run folder.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from host.config import GenerateConfig
from host.evaluate import subject_similarity
from host.models import ModelFolder
from host.models.base import decode_latents, spatial_factor
from host.models.folder import load_lora
from host.residuals import noise_of, processes
from runtime import atomic
from runtime.errors import BundleError
from runtime.manifest import BundleManifest, read_manifest
from runtime.trainer import ADAPTER

MAX_BATCH = 8


def draw(
    model: ModelFolder,
    prompts: list[str],
    seeds: list[int],
    *,
    transformer: Any,
    steps: int,
    guidance: float,
    image_side: int,
    prompt_tokens: int | None = None,
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
        prompt_tokens: Tokens of a prompt; None is what the model was trained with.
        label: Of the progress bar.
    """
    device = processes().device
    vae, transformer = model.load("vae"), transformer.to(device)
    unique = sorted(set(prompts))
    states = model.encode_prompts(unique, max_tokens=prompt_tokens)
    guided = model.adapter.takes_negative(model.normalized_config)
    nothing = model.encode_prompts([""], max_tokens=prompt_tokens, negative=True) if guided else None
    channels = model.normalized_config.num_channels
    side = image_side // spatial_factor(vae, channels)
    vae = vae.to(device)
    pictures: list[Image.Image] = []
    for start in tqdm(range(0, len(prompts), MAX_BATCH), desc=label, leave=False):
        rows = range(start, min(start + MAX_BATCH, len(prompts)))
        noise = torch.stack([noise_of(seeds[i], (channels, side, side)) for i in rows])
        positive = states[[unique.index(prompts[i]) for i in rows]]
        negative = nothing[[0] * len(rows)] if nothing else None
        with torch.no_grad():
            latents = model.denoise(
                transformer,
                positive.to(device),
                negative.to(device) if negative else None,
                noise.to(device),
                steps=steps,
                guidance=guidance,
            )
            pictures += [_picture(pixels) for pixels in decode_latents(vae, latents)]
    return pictures


def generate(run_dir: Path, config: GenerateConfig) -> dict[str, Any]:
    """Draws the comparison of a run: each prompt and seed by the base and by the adapter.

    Args:
        run_dir: A run with an adapter.
        config: Prompts, seeds and sampler settings.

    Returns:
        The content of `pictures.json`; similarities are to the bundle's photos.

    Raises:
        ValueError: The run has no adapter, or its base model changed since the export.
    """
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8")) if (run_dir / "run.json").is_file() else None
    if run is None:
        raise ValueError(f"{run_dir} is not a run folder. Train first: pocketdit train BUNDLE --run {run_dir}.")
    adapter_path = run_dir / ADAPTER
    if not adapter_path.is_file():
        raise ValueError(f"{run_dir} has no adapter yet (status {run['status']!r}). Resume it with `pocketdit train`.")
    bundle_dir = Path(run["bundle"])
    bundle = read_manifest(bundle_dir)
    model = ModelFolder(bundle.base.model, bundle.base.revision, bundle.base.variant)
    if model.sha256() != bundle.base.sha256:
        raise BundleError(
            f"{bundle.base.model} is not the model this bundle was cut from: its hash differs. Export again."
        )
    prompts = list(config.prompts) or [bundle.subject.instance_prompt]
    pairs = [(prompt, seed) for prompt in prompts for seed in config.seeds]
    side = config.image_side or int(bundle.export["image_side"])
    transformer, pictures = model.load("transformer"), {}
    for kind in ("base", "adapter"):
        if kind == "adapter":
            load_lora(model.adapter, transformer, adapter_path)
        pictures[kind] = draw(
            model,
            [prompt for prompt, _ in pairs],
            [seed for _, seed in pairs],
            transformer=transformer,
            steps=config.steps,
            guidance=config.guidance,
            image_side=side,
            prompt_tokens=bundle.export.get("prompt_tokens"),
            label=f"pictures of the {kind}",
        )
    photos = [Image.open(bundle_dir / photo.preview) for photo in bundle.subject.photos]
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
        "size": side,
        "items": items,
        "similarity": {kind: round(float(values.mean()), 4) for kind, values in similarity.items()},
    }
    atomic.write_json(run_dir / "pictures" / "pictures.json", result)
    return result


def _taught(bundle: BundleManifest) -> set[str]:
    return {photo.caption for photo in bundle.subject.photos} | {bundle.subject.instance_prompt}


def _picture(pixels: Tensor) -> Image.Image:
    array = ((pixels.permute(1, 2, 0).float().cpu().numpy() + 1) * 127.5).round().astype(np.uint8)
    return Image.fromarray(array)
