"""Makes the sample store: photos to patches, latents and prompt states, then the frozen base up to the cut and behind it.

Reads photos and the base model, writes `samples-*.safetensors`, one shard a process. The head is folded into the stored
block input; the tail is stored as its residual. Under `accelerate launch` each process makes its share.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from host import patches, schedule
from host.models import ModelFolder, PromptStates
from host.models.base import encode_images
from host.photos import Photo
from runtime.sample_store import SampleIdentity, SampleStoreWriter

STORED_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}


def processes() -> PartialState:
    """The processes of this export: one, or those of `accelerate launch` or `torchrun`, on CPUs where there is no GPU."""
    return PartialState(cpu=not torch.accelerator.is_available())


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePlan:
    """Every random choice of the pool, made before anything is computed."""

    identities: tuple[SampleIdentity, ...]
    photo_index: tuple[int, ...]
    prompts: tuple[str, ...]
    prompt_index: tuple[int, ...]


def plan_samples(
    photos: Sequence[Photo],
    *,
    count: int,
    seed: int,
    side_min: int,
    side_max: int,
    multiple: int,
    policy: patches.Policy,
    flip_probability: float,
    distribution: schedule.SigmaDistribution,
    shift: float,
) -> SamplePlan:
    """Draws photo, crop, noise level and noise seed of each sample.

    Args:
        photos: Accepted photos.
        count: Size of the pool.
        seed: All choices follow from it.
        side_min: Side of the patch, pixels.
        side_max: Shorter side of the prepared photo, pixels.
        multiple: Crop sides are multiples of this.
        policy: How the crop depends on the noise.
        flip_probability: Chance of mirroring.
        distribution: Of the noise levels.
        shift: Of the noise levels.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xD17]))
    sigmas = schedule.sample_sigmas(rng, count, distribution=distribution, shift=shift)
    # Every photo appears equally often, in an order of its own.
    photo_index = rng.permutation(np.arange(count) % len(photos))
    prompts = tuple(sorted({photo.caption for photo in photos}))
    sizes = [patches.prepared_size(photo.image.size, side_max) for photo in photos]
    identities = []
    for index in range(count):
        photo = photos[photo_index[index]]
        sample_rng = patches.sample_rng(seed, index)
        box = patches.draw_crop(
            sample_rng,
            sizes[photo_index[index]],
            float(sigmas[index]),
            side_min=side_min,
            side_max=side_max,
            multiple=multiple,
            policy=policy,
            flip_probability=flip_probability,
        )
        identities.append(
            SampleIdentity(
                index=index,
                photo=photo.name,
                photo_sha256=photo.sha256,
                crop=(box.left, box.top, box.side, int(box.flipped)),
                prompt=photo.caption,
                sigma=float(sigmas[index]),
                timestep=float(schedule.timestep(sigmas[index])),
                seed=int(sample_rng.integers(2**31)),
            )
        )
    return SamplePlan(
        identities=tuple(identities),
        photo_index=tuple(int(i) for i in photo_index),
        prompts=prompts,
        prompt_index=tuple(prompts.index(identity.prompt) for identity in identities),
    )


def noise_of(seed: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of one sample, float32, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def encode_patches(
    model: ModelFolder,
    photos: Sequence[Photo],
    plan: SamplePlan,
    rows: Sequence[int],
    side_min: int,
    side_max: int,
    batch: int,
) -> Tensor:
    """Patches of the samples `rows` as latents (N, C, h, w); the autoencoder is loaded for this and freed."""
    state = processes()
    vae = model.load("vae").to(state.device)
    prepared = [patches.prepare(photo.image, side_max) for photo in photos]
    latents = []
    for chunk in _progress(_batches(rows, batch), len(rows), batch, "latents"):
        cuts = []
        for row in chunk:
            left, top, side, flipped = plan.identities[row].crop
            box = patches.CropBox(left, top, side, bool(flipped))
            cuts.append(torch.from_numpy(patches.cut(prepared[plan.photo_index[row]], box, side_min)))
        latents.append(encode_images(vae, torch.stack(cuts).to(state.device)).float().cpu())
    del vae
    gc.collect()
    return torch.cat(latents)


@dataclass(frozen=True, slots=True)
class BaseOutputs:
    """What the frozen base makes of a batch of samples.

    Attributes:
        hidden: (B, S, D) input of the first middle block.
        tail_residual: (B, T, D) output minus input of the tail, on the image tokens: no other reaches the prediction.
        target: (B, T, P) velocity in token layout.
        block_inputs: What each middle block takes by its number in the base, each (B, ...).
        predict_inputs: What the predict function takes, each (B, ...).
        loss: (B,) mean squared error of the base's own prediction.
    """

    hidden: Tensor
    tail_residual: Tensor
    target: Tensor
    block_inputs: dict[int, dict[str, Tensor]]
    predict_inputs: dict[str, Tensor]
    loss: Tensor


@torch.no_grad()
def base_outputs(
    model: ModelFolder,
    transformer: Any,
    latents: Tensor,
    noise: Tensor,
    sigmas: Tensor,
    prompts: PromptStates,
    layers: Mapping[int, Sequence[str]],
    guidance: float,
) -> BaseOutputs:
    """Runs the frozen base on noisy latents, keeping what the cut needs.

    Args:
        model: Gives the adapter.
        transformer: The base.
        latents: (B, C, h, w) clean.
        noise: (B, C, h, w).
        sigmas: (B,) in (0, 1).
        prompts: B prompts.
        layers: Of each middle block, the layers that get LoRA.
        guidance: Of guidance-distilled models.
    """
    adapter = model.adapter
    grid = token_grid(model, (latents.shape[2], latents.shape[3]))
    num_image = grid[0] * grid[1]
    noisy = schedule.add_noise(latents, noise, sigmas)
    target = adapter.target_tokens(transformer, schedule.velocity(latents, noise))
    hidden, conditioning = adapter.embed(transformer, noisy, schedule.timestep(sigmas), prompts, guidance)
    first, last = min(layers), max(layers)
    at_head = at_tail = hidden
    for index in range(len(adapter.blocks(transformer))):
        if index == first:
            at_head = hidden
        hidden = adapter.run_block(transformer, index, hidden, conditioning, grid)
        if index == last:
            at_tail = hidden
    image = hidden[:, -num_image:]
    predict_inputs = {name: conditioning[name] for name in adapter.predict_inputs}
    predict, weights = adapter.predict_function(transformer), adapter.predict_weights(transformer)
    predictions = torch.stack(
        [predict(image[i], {n: v[i] for n, v in predict_inputs.items()}, weights) for i in range(len(image))]
    )
    return BaseOutputs(
        hidden=at_head,
        tail_residual=image - at_tail[:, -num_image:],
        target=target,
        block_inputs={i: adapter.block_inputs(transformer, i, conditioning, layers[i]) for i in layers},
        predict_inputs=predict_inputs,
        loss=(predictions - target).pow(2).flatten(1).mean(1),
    )


def per_block_name(index: int, name: str) -> str:
    """Name in the sample store of a program input that differs from block to block."""
    return f"block.{index}.{name}"


def sample_tensors(model: ModelFolder, out: BaseOutputs) -> dict[str, Tensor]:
    """Everything a training step takes of samples, by its name in the sample store, each (B, ...)."""
    per_block = model.adapter.per_block_inputs
    tensors = {"hidden": out.hidden, "tail_residual": out.tail_residual, "target": out.target} | out.predict_inputs
    for index, inputs in out.block_inputs.items():
        tensors |= {per_block_name(index, n) if n in per_block else n: value for n, value in inputs.items()}
    return tensors


def token_grid(model: ModelFolder, latent_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tokens for latents of (h, w)."""
    patch = model.geometry.patch_size
    return latent_size[0] // patch, latent_size[1] // patch


def make_samples(
    model: ModelFolder,
    transformer: Any,
    plan: SamplePlan,
    latents: Tensor,
    rows: Sequence[int],
    prompts: PromptStates,
    *,
    layers: Mapping[int, Sequence[str]],
    guidance: float,
    dtype: str,
    batch: int,
    shard_path: Path,
) -> dict[str, float]:
    """Runs the base over the samples `rows` and writes one shard.

    Args:
        model: The base's folder.
        transformer: The base, loaded.
        plan: All samples.
        latents: (len(rows), C, h, w).
        rows: Samples of this process.
        prompts: One state per prompt of the plan.
        layers: Of each middle block, the layers that get LoRA.
        guidance: Of guidance-distilled models.
        dtype: Stored type of the token tensors.
        batch: Samples at a time.
        shard_path: Where the shard goes.

    Returns:
        Relative L2 error of storing, per tensor.
    """
    device = processes().device
    transformer = transformer.to(device)
    with ExitStack() as stack:
        writer: SampleStoreWriter | None = None
        for chunk in _progress(_batches(range(len(rows)), batch), len(rows), batch, "residuals"):
            samples = [rows[i] for i in chunk]
            identities = [plan.identities[row] for row in samples]
            noise = torch.stack([noise_of(identity.seed, tuple(latents.shape[1:])) for identity in identities])
            states = prompts[[plan.prompt_index[row] for row in samples]]
            out = base_outputs(
                model,
                transformer,
                latents[list(chunk)].to(device),
                noise.to(device),
                torch.tensor([identity.sigma for identity in identities], dtype=torch.float32, device=device),
                states.to(device),
                layers,
                guidance,
            )
            tensors = sample_tensors(model, out)
            for name in model.adapter.prompt_inputs:
                del tensors[name]
            if writer is None:
                # The shapes are known once the first batch has run.
                writer = stack.enter_context(
                    SampleStoreWriter(
                        shard_path,
                        [plan.identities[row] for row in rows],
                        [plan.prompt_index[row] for row in rows],
                        {n: (stored_dtype(n, dtype), tuple(v.shape[1:])) for n, v in tensors.items()},
                        _prompt_conditioning(model, transformer, latents[:1].to(device), prompts, guidance),
                    )
                )
            for i, identity in enumerate(identities):
                writer.write(identity.index, {n: v[i] for n, v in tensors.items()}, float(out.loss[i]))
    assert writer is not None, "a process without samples"
    return writer.relative_errors()


def stored_dtype(name: str, dtype: str) -> torch.dtype:
    """Stored type of a sample tensor: token tensors as asked, int8 only where a scale a token makes sense, the small
    conditioning exactly."""
    if name in ("hidden", "tail_residual"):
        return STORED_DTYPES[dtype]
    if name == "target":
        return torch.float32 if dtype == "fp32" else torch.bfloat16
    return torch.float32


@torch.no_grad()
def _prompt_conditioning(
    model: ModelFolder, transformer: Any, latents: Tensor, prompts: PromptStates, guidance: float
) -> dict[str, Tensor]:
    """The conditioning that depends on the prompt alone, (P, ...) each."""
    count = len(prompts.states)
    timesteps = torch.zeros(count, device=latents.device)
    _, conditioning = model.adapter.embed(
        transformer, latents.expand(count, -1, -1, -1), timesteps, prompts.to(latents.device), guidance
    )
    return {name: conditioning[name].float().cpu().contiguous() for name in model.adapter.prompt_inputs}


def _batches(rows: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), batch):
        yield rows[start : start + batch]


def _progress(batches: Iterator[Sequence[int]], count: int, batch: int, label: str) -> Iterator[Sequence[int]]:
    total = -(-count // batch)
    return iter(tqdm(batches, total=total, desc=label, disable=not processes().is_main_process, leave=False))
