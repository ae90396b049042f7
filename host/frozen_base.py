"""Runs the frozen base over noisy patches, one block at a time, and keeps what the cut needs.

Only one block's weights are in memory at once, so a workstation smaller than the model can export it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from host import schedule
from host.models import ModelFolder, PromptStates

LoadBlock = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """A batch of patch samples before the base.

    Attributes:
        latents: (B, C, h, w) clean.
        noise: (B, C, h, w).
        sigmas: (B,) in (0, 1).
        prompts: B prompts.
    """

    latents: Tensor
    noise: Tensor
    sigmas: Tensor
    prompts: PromptStates

    def __getitem__(self, rows: Sequence[int]) -> "Patches":
        index = list(rows)
        return Patches(
            latents=self.latents[index],
            noise=self.noise[index],
            sigmas=self.sigmas[index],
            prompts=self.prompts[index],
        )


@dataclass(slots=True)
class _State:
    """A batch on its way through the blocks; `hidden` waits in the memory of the CPU."""

    hidden: Tensor
    conditioning: dict[str, Tensor]
    target: Tensor
    at_head: Tensor | None = None
    at_tail: Tensor | None = None
    block_inputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)


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
    batches: Sequence[Patches],
    layers: Mapping[int, Sequence[str]],
    guidance: float,
    *,
    load_block: LoadBlock = lambda index: nullcontext(),
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[BaseOutputs]:
    """Runs the frozen base on noisy latents, keeping what the cut needs.

    Args:
        model: Gives the adapter.
        transformer: The base, or `ModelFolder.hollow`.
        batches: Samples; they go through each block one batch after the other.
        layers: Of each middle block, the layers that get LoRA.
        guidance: Of guidance-distilled models.
        load_block: Called with a block's number; its weights are needed inside the context only.
        progress: Wraps the numbers of the blocks.

    Returns:
        One for each batch, on the CPU unless the batch is on the meta device.
    """
    adapter = model.adapter
    first, last = min(layers), max(layers)
    grid = token_grid(model, (batches[0].latents.shape[2], batches[0].latents.shape[3]))
    device = batches[0].latents.device
    states = [_embedded(model, transformer, batch, guidance) for batch in batches]
    for index in progress(range(len(adapter.blocks(transformer)))):
        with load_block(index):
            for state in states:
                if index == first:
                    state.at_head = state.hidden
                if index in layers:
                    inputs = adapter.block_inputs(transformer, index, state.conditioning, layers[index])
                    state.block_inputs[index] = {name: _resting(value) for name, value in inputs.items()}
                hidden = adapter.run_block(transformer, index, state.hidden.to(device), state.conditioning, grid)
                state.hidden = _resting(hidden)
                if index == last:
                    state.at_tail = state.hidden
    return [_predicted(model, transformer, state, grid, device) for state in states]


def _embedded(model: ModelFolder, transformer: Any, batch: Patches, guidance: float) -> _State:
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.sigmas)
    times = schedule.timestep(batch.sigmas)
    hidden, conditioning = model.adapter.embed(transformer, noisy, times, batch.prompts, guidance)
    target = model.adapter.target_tokens(transformer, schedule.velocity(batch.latents, batch.noise))
    return _State(_resting(hidden), conditioning, target)


def _predicted(
    model: ModelFolder, transformer: Any, state: _State, grid: tuple[int, int], device: torch.device
) -> BaseOutputs:
    assert state.at_head is not None
    assert state.at_tail is not None
    adapter, num_image = model.adapter, grid[0] * grid[1]
    image = state.hidden[:, -num_image:]
    predictions = adapter.run_output(transformer, image.to(device), state.conditioning)
    return BaseOutputs(
        hidden=state.at_head,
        tail_residual=image - state.at_tail[:, -num_image:],
        target=_resting(state.target),
        block_inputs=state.block_inputs,
        predict_inputs={name: _resting(state.conditioning[name]) for name in adapter.predict_inputs},
        loss=_resting((predictions - state.target).pow(2).flatten(1).mean(1)),
    )


def _resting(value: Tensor) -> Tensor:
    """Off the accelerator, where the weights need the room; shapes on the meta device stay there."""
    return value if value.is_meta else value.cpu()


def flops_per_second(device: torch.device) -> float:
    """Rate of a 1024 x 1024 float32 product on a device, measured for a tenth of a second."""
    x = torch.randn(1024, 1024, device=device)
    y, count, start = x @ x, 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < 0.1:
        y, count = x @ x, count + 1
        float(y[0, 0])  # waits for the accelerator
    return count * 2 * 1024**3 / seconds


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
    patch = model.normalized_config.patch_size
    return latent_size[0] // patch, latent_size[1] // patch
