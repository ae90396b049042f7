"""LoRA on the whole transformer, with PEFT: what nearly everybody uses. With dynamic patches it is the paper's second row."""

from dataclasses import dataclass
from pathlib import Path

from host.baselines.base import Task, Trained, adamw, add_lora, detached, fit, velocity_losses
from host.config import PatchPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """W + (alpha / rank) B A on all blocks (Hu et al., arXiv 2106.09685)."""

    title: str = "LoRA"
    learning_rate: float = 1e-4
    policy: PatchPolicy = "full"
    """Whole pictures, or patches."""

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool(self.policy)
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        matrices = add_lora(pool, transformer, range(len(model.adapter.blocks(transformer))))
        trained = list(matrices.values())
        optimizer = adamw(trained, task.training)
        losses = fit(
            task,
            len(pool.texts),
            lambda rows: velocity_losses(model, transformer, pool.patches[rows], guidance),
            lambda: trained,
            lambda: [optimizer],
        )
        return Trained(model=model, transformer=transformer, tensors=detached(matrices), losses=losses)
