"""Textual inversion (arXiv 2208.01618): one token embedding is learnt, the transformer is not touched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from host.baselines.base import Task, Trained, adamw, detached, fit, velocity_losses
from host.baselines.placeholder import TOKEN, Placeholder


@dataclass(frozen=True, kw_only=True, slots=True)
class TextualInversion:
    """A vector per text encoder, trained through the encoders."""

    title: str = "textual inversion"
    learning_rate: float = 5e-3

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        pool = task.pool("full")
        settings = task.config.export
        placeholder = Placeholder(pool.model, task.class_words)
        transformer = pool.model.load("transformer")
        texts = placeholder.named_in(pool.texts, task.words)

        def losses(rows: Sequence[int]) -> Tensor:
            unique = sorted({texts[row] for row in rows})
            states = placeholder.encode(unique, settings.prompt_tokens)
            batch = replace(pool.patches[rows], prompts=states[[unique.index(texts[row]) for row in rows]])
            return velocity_losses(pool.model, transformer, batch, settings.guidance)

        trained = list(placeholder.vectors.values())
        optimizer = adamw(trained, task.training)
        means = fit(task, len(texts), losses, lambda: trained, lambda: [optimizer])
        tensors = detached(placeholder.vectors)
        return Trained(model=placeholder.model, transformer=transformer, tensors=tensors, losses=means, words=TOKEN)
