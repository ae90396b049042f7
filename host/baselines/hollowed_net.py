"""HollowedNet (arXiv 2411.01179) as ported to a DiT: the *middle* blocks are removed and their stored part is added back.

Built for U-Nets, where the deep middle layers matter least and the outer ones take the skip connections around them. A DiT's
residual stream is its skip connection, so what the middle added is stored and added: the outer blocks at either end train.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from host.baselines.base import (
    Skipped,
    Task,
    Trained,
    adamw,
    add_lora,
    detached,
    fit,
    span_residuals,
    velocity_losses,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HollowedNet:
    """LoRA on the outer blocks, put back on the full net for drawing."""

    share: float = 0.3
    """Of the blocks removed, from the middle."""
    title: str = "HollowedNet, 30 %"
    learning_rate: float = 1e-4

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool("full")
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        num_blocks = len(model.adapter.blocks(transformer))
        removed = max(1, round(self.share * num_blocks))
        start = (num_blocks - removed) // 2
        hollow = range(start, start + removed)
        (stored,) = span_residuals(pool, transformer, [hollow])
        matrices = add_lora(pool, transformer, [i for i in range(num_blocks) if i not in hollow])

        def losses(rows: Sequence[int]) -> torch.Tensor:
            residual = stored[list(rows)]
            skipped = [Skipped(hollow, lambda hidden: hidden + residual)]
            return velocity_losses(model, transformer, pool.patches[rows], guidance, skipped)

        trained = list(matrices.values())
        optimizer = adamw(trained, task.training)
        means = fit(task, len(pool.texts), losses, lambda: trained, lambda: [optimizer])
        return Trained(model=model, transformer=transformer, tensors=detached(matrices), losses=means)
