"""Block skipping in PyTorch: only middle blocks run and are trained, with or without the residuals of the others.

Without residuals it is the paper's ablation. With them it is what our runtime trains, as a check and for experiments.
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
from host.config import PatchPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSkipping:
    """LoRA on the blocks between the first n and the last m, which are left out of training (DiT-BlockSkip)."""

    title: str
    cut: tuple[int, int]
    """Blocks left out at the head and at the tail."""
    residuals: bool
    """Whether the frozen base's residuals stand in for them."""
    policy: PatchPolicy = "low-to-high"
    learning_rate: float = 1e-4

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool(self.policy, self.cut)
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        num_blocks = len(model.adapter.blocks(transformer))
        head, tail = range(self.cut[0]), range(num_blocks - self.cut[1], num_blocks)
        stored = span_residuals(pool, transformer, (head, tail)) if self.residuals else [None, None]
        matrices = add_lora(pool, transformer, range(head.stop, tail.start))

        def losses(rows: Sequence[int]) -> torch.Tensor:
            skipped = [
                Skipped(span, None if residual is None else residual[list(rows)])
                for span, residual in zip((head, tail), stored, strict=True)
            ]
            return velocity_losses(model, transformer, pool.patches[rows], guidance, skipped)

        trained = list(matrices.values())
        optimizer = adamw(trained, task.training)
        means = fit(task, len(pool.texts), losses, lambda: trained, lambda: [optimizer])
        return Trained(model=model, transformer=transformer, tensors=detached(matrices), losses=means)
