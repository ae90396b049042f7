"""DreamBooth (arXiv 2208.12242): trains the whole transformer, with or without preserving what the base makes of the class."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from host import patches
from host.baselines.base import Pool, Task, Trained, adamw, fit, velocity_losses
from host.frozen_base import Patches
from host.generate import draw
from host.models.base import encode_images

PRIOR_PICTURES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DreamBooth:
    """Full fine-tuning on the subject; with `prior` each step takes as many samples of the base's own pictures as well."""

    title: str
    prior: bool
    learning_rate: float = 5e-6
    prior_weight: float = 1.0

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`.

        Raises:
            ValueError: Prior preservation without prompts of the class.
        """
        if self.prior and not task.prior_prompts:
            raise ValueError(f"{self.title}: prior preservation needs prompts of other things; give `prior_prompts`.")
        pool = task.pool("full")
        model, guidance = pool.model, task.config.export.guidance
        transformer = model.load("transformer")
        kept = _prior(task, pool) if self.prior else None
        transformer.requires_grad_(True)

        def losses(rows: Sequence[int]) -> Tensor:
            own = velocity_losses(model, transformer, pool.patches[rows], guidance)
            if kept is None:
                return own
            return own + self.prior_weight * velocity_losses(model, transformer, kept[rows], guidance)

        trained = list(transformer.parameters())
        optimizer = adamw(trained, task.training)
        means = fit(task, len(pool.texts), losses, lambda: trained, lambda: [optimizer])
        transformer.requires_grad_(False)
        tensors = {name: value.detach() for name, value in transformer.named_parameters()}
        return Trained(model=model, transformer=transformer, tensors=tensors, losses=means)


def _prior(task: Task, pool: Pool) -> Patches:
    """As many samples as the pool has, of pictures the base draws of its class, with the pool's noise levels and noise."""
    settings, exporter, model = task.config.generate, pool.exporter, pool.model
    prompts = list(itertools.islice(itertools.cycle(task.prior_prompts), PRIOR_PICTURES))
    pictures = draw(
        model,
        prompts,
        range(PRIOR_PICTURES),
        transformer=model.load("transformer"),
        steps=settings.steps,
        guidance=settings.guidance,
        image_side=exporter.image_side,
        label="pictures of the class",
    )
    vae = model.load("vae")
    whole = patches.CropBox(0, 0, exporter.image_side, False)
    pixels = torch.stack([torch.from_numpy(patches.cut(picture, whole, exporter.image_side)) for picture in pictures])
    with torch.no_grad():
        latents = encode_images(vae, pixels).float()
    numbers = [row % PRIOR_PICTURES for row in range(len(pool.texts))]
    states = model.encode_prompts(prompts, max_tokens=task.config.export.prompt_tokens)
    return replace(pool.patches, latents=latents[numbers], prompts=states[numbers])
