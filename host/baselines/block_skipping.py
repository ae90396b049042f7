"""Block skipping in PyTorch: only middle blocks run and are trained, with or without the residuals of the others.

Without residuals it is the paper's ablation. With them it is what our runtime trains, for experiments that it cannot do: a
residual that is made anew on the way, or a tail that answers (host/tail_map.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from host.baselines.base import (
    Pool,
    Skipped,
    Task,
    Trained,
    adamw,
    add_lora,
    detached,
    fit,
    states_at,
    velocity_losses,
)
from host.config import PatchPolicy
from host.tail_map import TailMap

Watcher = Callable[[int, Pool, Any], None]
"""Gets the step about to be taken, the samples, and the transformer as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSkipping:
    """LoRA on the blocks between the first n and the last m, which are left out of training (DiT-BlockSkip)."""

    title: str
    cut: tuple[int, int]
    """Blocks left out at the head and at the tail."""
    residuals: bool = True
    """Whether the frozen base's residuals stand in for them."""
    refreshes: int = 0
    """Times the tail's residuals are made anew in training, with the LoRA as it is then, evenly spread."""
    tail_map: TailMap | None = None
    """Answers to the change of the tail's input, beside the stored residual."""
    tail_runs: bool = False
    """Whether the frozen tail runs in place of its residual: what no stand-in can beat, at the memory and time it saves."""
    policy: PatchPolicy = "low-to-high"
    learning_rate: float = 1e-4
    watch: Watcher = lambda step, pool, transformer: None

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool(self.policy, self.cut)
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        num_blocks = len(model.adapter.blocks(transformer))
        head, tail = range(self.cut[0]), range(num_blocks - self.cut[1], num_blocks)
        places = (head.stop, tail.start, tail.stop)
        at_head, at_tail, at_end = states_at(pool, transformer, places) if self.residuals else [None] * 3
        matrices = add_lora(pool, transformer, range(head.stop, tail.start))

        def behind_tail(hidden: Tensor, rows: list[int]) -> Tensor:
            if at_tail is None or at_end is None:
                return hidden
            residual = at_end[rows] - at_tail[rows]
            if self.tail_map is not None:
                residual = residual + self.tail_map.answer(hidden - at_tail[rows], pool.patches.sigmas[rows])
            return hidden + residual

        def losses(rows: Sequence[int]) -> Tensor:
            chosen = list(rows)
            # No trained weight lies upstream of the head's end, so its state is taken as it is.
            start = Skipped(head, lambda hidden: hidden if at_head is None else at_head[chosen])
            end = Skipped(tail, lambda hidden: behind_tail(hidden, chosen))
            skips = [start] if self.tail_runs else [start, end]
            return velocity_losses(model, transformer, pool.patches[chosen], guidance, skips)

        refresh_steps = [task.training.steps * i // (self.refreshes + 1) for i in range(1, self.refreshes + 1)]

        def before_step(step: int) -> None:
            nonlocal at_tail, at_end
            self.watch(step, pool, transformer)
            if step in refresh_steps:
                at_tail, at_end = states_at(pool, transformer, places[1:])

        trained = list(matrices.values())
        optimizer = adamw(trained, task.training)
        means = fit(task, len(pool.texts), losses, lambda: trained, lambda: [optimizer], before_step=before_step)
        self.watch(task.training.steps, pool, transformer)
        return Trained(model=model, transformer=transformer, tensors=detached(matrices), losses=means)
