"""ZOODiP (arXiv 2503.14868): textual inversion of an int8 model by zeroth-order optimisation: forward passes only.

The gradient is projected onto the subspace the token has moved in: the principal directions of its last tau values that hold
all but nu of their variance.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export import quantize
from host.baselines.base import Pool, Task, Trained, detached, set_rate, velocity_losses
from host.baselines.placeholder import TOKEN, Placeholder, concatenated
from host.frozen_base import Patches
from runtime.sample_store import sample_order

SIGMAS = (0.5, 0.9)
"""Partial uniform timestep sampling: timesteps between 500 and 900."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Zoodip:
    """A token learnt by finite differences along random directions; Adam."""

    title: str = "ZOODiP"
    learning_rate: float = 5e-3
    directions: int = 2
    """Random directions a step (n)."""
    distance: float = 1e-3
    """How far along each the loss is taken (mu)."""
    history: int = 128
    """Token values the subspace is made of, and steps between two subspaces (tau)."""
    variance_left: float = 1e-3
    """Share of the variance the subspace may miss (nu)."""

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`; one loss is kept for each of the task's steps, the mean of the small steps in it."""
        pool = task.pool("full")
        settings, training = task.config.export, task.training
        placeholder = Placeholder(pool.model, task.class_words)
        texts = placeholder.named_in(pool.texts, task.words)
        transformer = int8_transformer(pool)
        patches = _at_partial_uniform_times(pool.patches)
        token = torch.nn.Parameter(torch.cat([vector.detach() for vector in placeholder.vectors.values()]))
        optimizer = torch.optim.Adam([token], lr=training.learning_rate)
        generator = torch.Generator().manual_seed(training.seed)

        order, past, basis = sample_order(len(pool.texts), training.seed), [], None
        # A backward pass costs two forward passes, so as many passes as a method with gradients makes for a step.
        small_steps = max(1, 3 * training.accumulation // (1 + self.directions))

        def losses_at(tokens: Tensor, row: int) -> Tensor:
            states = []
            for value in tokens:
                placeholder.set(value)
                states.append(placeholder.encode([texts[row]], settings.prompt_tokens))
            batch = replace(patches[[row] * len(tokens)], prompts=concatenated(states))
            return velocity_losses(pool.model, transformer, batch, settings.guidance)

        means = []
        with task.during(), torch.no_grad():
            for step in range(training.steps):
                set_rate(optimizer, training, step)
                losses = []
                for row in itertools.islice(order, small_steps):
                    moves = torch.randn(self.directions, len(token), generator=generator)
                    here, *there = losses_at(torch.cat([token[None], token + self.distance * moves]), row)
                    slopes = (torch.stack(there) - here) / self.distance
                    gradient = (slopes[:, None] * moves).mean(0)
                    token.grad = gradient if basis is None else basis @ (basis.T @ gradient)
                    optimizer.step()
                    losses.append(float(here))
                    past.append(token.detach().clone())
                    if len(past) == self.history:
                        basis, past = subspace(torch.stack(past), self.variance_left), []
                means.append(sum(losses) / len(losses))
            placeholder.set(token)
        tensors = detached(placeholder.vectors)
        return Trained(model=placeholder.model, transformer=transformer, tensors=tensors, losses=means, words=TOKEN)


def subspace(tokens: Tensor, variance_left: float) -> Tensor:
    """Principal directions (C, K) of tokens (N, C) that hold all but `variance_left` of their variance."""
    _, values, directions = torch.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    shares = values.square().cumsum(0) / values.square().sum().clamp_min(1e-30)
    return directions[: int((shares < 1 - variance_left).sum()) + 1].T


def int8_transformer(pool: Pool) -> Any:
    """The base with the numbers that int8 weights stand for in its blocks, as our own export stores them."""
    transformer = pool.model.load("transformer")
    for ref in pool.model.adapter.blocks(transformer):
        block = transformer.get_submodule(ref.module)
        for name, parameter in block.named_parameters():
            matrix = (
                parameter.data.flatten(1) if parameter.ndim == 4 and parameter.shape[2:] == (1, 1) else parameter.data
            )
            if quantize.is_linear(name, matrix):
                stored = quantize.stored({name: matrix}, "int8")
                parameter.data.copy_(quantize.restored(name, stored).view_as(parameter))
    return transformer


def _at_partial_uniform_times(patches: Patches) -> Patches:
    """The same samples with their noise levels spread evenly over SIGMAS, in the same order."""
    low, high = SIGMAS
    ranks = patches.sigmas.argsort().argsort().float()
    return replace(patches, sigmas=low + (high - low) * (ranks + 0.5) / len(ranks))
