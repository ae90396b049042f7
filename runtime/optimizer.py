"""AdamW over one flat float32 vector, the schedule of its learning rate, and clipping by global norm.

ExecuTorch's training extension has only SGD on Android, so this is ours; it runs over the few LoRA floats.
Keep in sync with android_demo's AdamW.kt.
"""

import math

import torch

PIECE = 1 << 16
"""Parameters updated at once."""


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), in float32.

    Attributes:
        exp_avg: (P,) first moment.
        exp_avg_sq: (P,) second moment.
        step_count: Updates done so far.
    """

    def __init__(self, num_parameters: int) -> None:
        """Zero moments for `num_parameters` floats."""
        self.exp_avg = torch.zeros(num_parameters)
        self.exp_avg_sq = torch.zeros(num_parameters)
        self.step_count = 0

    def step(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        """Updates `parameters` (P,) in place with `gradient` (P,), by pieces: the denominator would be a vector more."""
        self.step_count += 1
        bias1 = 1 - beta1**self.step_count
        bias2 = 1 - beta2**self.step_count
        vectors = (vector.split(PIECE) for vector in (parameters, gradient, self.exp_avg, self.exp_avg_sq))
        for values, slope, exp_avg, exp_avg_sq in zip(*vectors, strict=True):
            values.mul_(1 - learning_rate * weight_decay)
            exp_avg.lerp_(slope, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            denominator = exp_avg_sq.sqrt().div_(math.sqrt(bias2)).add_(epsilon)
            values.addcdiv_(exp_avg, denominator, value=-learning_rate / bias1)


def clip_gradient(gradient: torch.Tensor, max_norm: float) -> float:
    """Scales `gradient` (P,) in place to at most `max_norm` and returns its norm before; 0 turns clipping off."""
    norm = float(torch.linalg.vector_norm(gradient))
    if max_norm > 0 and norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm


def scheduled_rate(step: int, *, steps: int, learning_rate: float, warmup_steps: int, schedule: str) -> float:
    """Learning rate of update `step` (from 0): linear warm-up, then constant or a half cosine down to zero."""
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return learning_rate
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
