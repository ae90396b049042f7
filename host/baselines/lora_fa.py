"""LoRA-FA (arXiv 2308.03303): A stays as drawn, only B trains; PEFT's optimizer scales B's gradient to make up for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.optimizers.lorafa import LoraFAOptimizer
from torch import nn

from host.baselines.base import Task, Trained, add_lora, detached, fit, velocity_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFA:
    """LoRA with A frozen, on all blocks."""

    title: str = "LoRA-FA"
    learning_rate: float = 1e-4

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool("full")
        model, settings = pool.model, task.config.export
        transformer = model.load("transformer")
        matrices = add_lora(pool, transformer, range(len(model.adapter.blocks(transformer))))
        for name, matrix in matrices.items():
            matrix.requires_grad_("lora_B" in name)
        trained = [matrix for matrix in matrices.values() if matrix.requires_grad]
        optimizer = _FlatLoraFA(matrices, settings.lora_alpha / settings.lora_rank, task)
        losses = fit(
            task,
            len(pool.texts),
            lambda rows: velocity_losses(model, transformer, pool.patches[rows], settings.guidance),
            lambda: trained,
            lambda: [optimizer],
        )
        return Trained(model=model, transformer=transformer, tensors=detached(matrices), losses=losses)


class _FlatLoraFA(LoraFAOptimizer):
    """PEFT's optimizer on matrices: those of 1x1 convolutions have two axes of size 1 more, which it does not know."""

    def __init__(self, matrices: dict[str, nn.Parameter], scale: float, task: Task) -> None:
        self._matrices = list(matrices.values())
        flat = [nn.Parameter(matrix.data.flatten(1), matrix.requires_grad) for matrix in self._matrices]
        group: Any = {"params": flat, "names": list(matrices), "scaling_factors": [scale] * len(flat)}
        training = task.training
        super().__init__(
            [group],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            weight_decay=training.weight_decay,
        )

    def step(self, closure: Any = None) -> Any:
        for own, flat in zip(self._matrices, self.param_groups[0]["params"], strict=True):
            flat.grad = None if own.grad is None else own.grad.flatten(1)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for own in self._matrices:
            own.grad = None
