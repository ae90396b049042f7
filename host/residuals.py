"""Makes the sample store: photos to patches, latents and prompt states, then the frozen base up to the cut and behind it.

Reads photos and the base model, writes `samples-*.safetensors`, one shard a process. The head is folded into the stored
block input; the tail is stored as its residual. Under `accelerate launch` each process makes its share.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from host import patches, schedule
from host.frozen_base import Patches, base_outputs, sample_tensors
from host.models import ModelFolder, PromptStates
from host.models.base import encode_images
from host.photos import Photo
from runtime.sample_store import SampleIdentity, SampleStoreWriter

T = TypeVar("T")
WAVE_BYTES = 4 * 1024**3
"""Memory the states of samples may take while the base's blocks go by."""
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
    for chunk in _progress(_batches(rows, batch), "latents"):
        cuts = []
        for row in chunk:
            left, top, side, flipped = plan.identities[row].crop
            box = patches.CropBox(left, top, side, bool(flipped))
            cuts.append(torch.from_numpy(patches.cut(prepared[plan.photo_index[row]], box, side_min)))
        latents.append(encode_images(vae, torch.stack(cuts).to(state.device)).float().cpu())
    del vae
    gc.collect()
    return torch.cat(latents)


def make_samples(
    model: ModelFolder,
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
    transformer = model.hollow(device)
    prompts = prompts.to(device)
    # All samples of a wave wait in memory while the blocks go by; one wave unless there are very many.
    wave_size = _wave_size(model, transformer, latents, prompts, guidance)
    with ExitStack() as stack:
        writer: SampleStoreWriter | None = None
        for wave in _batches(range(len(rows)), wave_size):
            chunks = list(_batches(wave, batch))
            batches = [
                patches_of(plan, [rows[i] for i in chunk], latents[list(chunk)].to(device), prompts) for chunk in chunks
            ]
            outputs = base_outputs(
                model,
                transformer,
                batches,
                layers,
                guidance,
                load_block=lambda index: model.block(transformer, index, device),
                progress=lambda blocks: _progress(blocks, "residuals"),
            )
            for chunk, out in zip(chunks, outputs, strict=True):
                tensors = sample_tensors(model, out)
                for name in model.adapter.prompt_inputs:
                    del tensors[name]
                if writer is None:
                    # The shapes are known once the first wave has run.
                    writer = stack.enter_context(
                        SampleStoreWriter(
                            shard_path,
                            [plan.identities[row] for row in rows],
                            [plan.prompt_index[row] for row in rows],
                            {n: (stored_dtype(n, dtype), tuple(v.shape[1:])) for n, v in tensors.items()},
                            _prompt_conditioning(model, transformer, latents[:1].to(device), prompts, guidance),
                        )
                    )
                for i, number in enumerate(chunk):
                    writer.write(rows[number], {n: v[i] for n, v in tensors.items()}, float(out.loss[i]))
    assert writer is not None, "a process without samples"
    return writer.relative_errors()


def patches_of(plan: SamplePlan, samples: Sequence[int], latents: Tensor, prompts: PromptStates) -> Patches:
    """The samples `samples` with latents (len(samples), C, h, w) and one prompt state per prompt of the plan."""
    identities = [plan.identities[row] for row in samples]
    noise = torch.stack([noise_of(identity.seed, tuple(latents.shape[1:])) for identity in identities])
    return Patches(
        latents=latents,
        noise=noise.to(latents.device),
        sigmas=torch.tensor([i.sigma for i in identities], dtype=torch.float32, device=latents.device),
        prompts=prompts[[plan.prompt_index[row] for row in samples]],
    )


@torch.no_grad()
def _wave_size(model: ModelFolder, transformer: Any, latents: Tensor, prompts: PromptStates, guidance: float) -> int:
    """Samples whose states fit WAVE_BYTES: the state three times, and what the middle blocks take."""
    time = torch.zeros(1, device=prompts.states.device)
    hidden, conditioning = model.adapter.embed(transformer, latents[:1].to(time.device), time, prompts[[0]], guidance)
    size = 3 * hidden.nbytes + sum(value.nbytes for value in conditioning.values())
    return max(1, WAVE_BYTES // size)


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


def _progress(items: Iterable[T], label: str) -> Iterator[T]:
    return iter(tqdm(list(items), desc=label, disable=not processes().is_main_process, leave=False))
