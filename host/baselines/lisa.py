"""LISA (arXiv 2403.17919): full-rank training of a few blocks at a time, drawn anew every K steps; the ends always train."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from host.baselines.base import Task, Trained, adamw, fit, velocity_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Lisa:
    """AdamW on `active` random blocks, and on everything before and after the blocks."""

    title: str = "LISA"
    learning_rate: float = 1e-5
    active: int = 2
    """Blocks trained at a time (the paper's gamma)."""
    period: int = 20
    """Steps between draws (the paper's K)."""

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool("full")
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        blocks = [list(transformer.get_submodule(ref.module).parameters()) for ref in model.adapter.blocks(transformer)]
        inside = {id(parameter) for block in blocks for parameter in block}
        ends = [parameter for parameter in transformer.parameters() if id(parameter) not in inside]
        for parameter in ends:
            parameter.requires_grad_(True)
        rng = np.random.default_rng(np.random.SeedSequence([task.training.seed, 0x115A]))
        of_ends = adamw(ends, task.training)
        chosen: list[nn.Parameter] = []
        of_chosen: list[torch.optim.Optimizer] = []

        def redraw(step: int) -> None:
            if step % self.period:
                return
            for parameter in chosen:
                parameter.requires_grad_(False)
            numbers = rng.choice(len(blocks), min(self.active, len(blocks)), replace=False)
            chosen[:] = [parameter for number in numbers for parameter in blocks[number]]
            for parameter in chosen:
                parameter.requires_grad_(True)
            # The moments of frozen blocks are dropped, which is where the memory is saved.
            of_chosen[:] = [adamw(chosen, task.training)]

        def losses(rows: Sequence[int]) -> torch.Tensor:
            return velocity_losses(model, transformer, pool.patches[rows], guidance)

        means = fit(
            task,
            len(pool.texts),
            losses,
            lambda: [*ends, *chosen],
            lambda: [of_ends, *of_chosen],
            before_step=redraw,
        )
        transformer.requires_grad_(False)
        tensors = {name: value.detach() for name, value in transformer.named_parameters()}
        return Trained(model=model, transformer=transformer, tensors=tensors, losses=means)
