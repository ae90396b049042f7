"""Pretrains the embedded base model on the tiny world; stops at a wall-clock limit and resumes.

Reads the npm packages (see world.py) and this folder's weights, writes `transformer/` here and, in the work folder, a
checkpoint and picture grids. One command, two hours on two cores:
`python -m host.tiny_base.pretrain --minutes 120 --work-dir build/pretrain`.
"""

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SanaTransformer2DModel
from PIL import Image
from torch import Tensor, nn

from host.generate import draw
from host.models import EMBEDDED, ModelFolder
from host.tiny_base import world
from host.tiny_base.autoencoder import PCAAutoencoder
from runtime.atomic import atomic_path

FOLDER = Path(__file__).parent
BATCH = 64
SMALL_SHARE = 0.1
"""Share of steps on 64 px crops, twice the batch: what patch samples look like."""
CROP_SIDES = (64, 80, 96, 112, 128)
SCALES = (107, 110, 113)
BACKGROUND_VARIANTS = 80
OBJECT_JITTER = 1.0
"""Standard deviation of an object's place, pixels."""
PROMPT_DROPOUT = 0.1
SIGMA_MEAN, SIGMA_DEVIATION = 1.4, 1.2
"""Noise levels are sigmoid(normal(1.4, 1.2)), 40 % of them above 0.85: there the prompt alone says what to draw, and there
a model that denoises well still has the objects to learn."""
MUON_RATE, ADAMW_RATE = 6e-3, 8e-4
WARMUP_STEPS, DECAY_SHARE = 100, 0.4
EMA_DECAY = 0.998
GRID_LABELS = (
    "red apple",
    "dog",
    "rocket",
    "sunflower",
    "hedgehog",
    "hamburger",
    "butterfly",
    "pizza",
    "mushroom",
    "fox",
)


class World:
    """Pre-rendered objects and backgrounds, so that a picture costs one blend."""

    def __init__(self, labels: Sequence[str], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.objects = [[_premultiplied(e.image, side) for side in SCALES] for e in world.load_emoji(labels)]
        self.backgrounds = [
            np.stack([world.draw_background(name, rng) for _ in range(BACKGROUND_VARIANTS)])
            for name in world.BACKGROUNDS
        ]
        self.prompts = [world.prompt_of(label, name) for label in labels for name in world.BACKGROUNDS] + [""]

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A picture (128, 128, 3) in 0..1 and the row of its prompt."""
        label, name = int(rng.integers(len(self.objects))), int(rng.integers(len(self.backgrounds)))
        emoji = self.objects[label][int(rng.integers(len(SCALES)))]
        image = self.backgrounds[name][rng.integers(BACKGROUND_VARIANTS)].astype(np.float32) / 255
        side = emoji.shape[0]
        left, top = (
            int(np.clip(round((world.SIDE - side) / 2 + rng.normal(0, OBJECT_JITTER)), 0, world.SIDE - side))
            for _ in "xy"
        )
        place = image[top : top + side, left : left + side]
        place *= 1 - emoji[..., 3:]
        place += emoji[..., :3]
        prompt = len(self.prompts) - 1 if rng.random() < PROMPT_DROPOUT else label * len(self.backgrounds) + name
        return image, prompt

    def batch(self, rng: np.random.Generator, count: int, small: bool) -> tuple[Tensor, list[int]]:
        """Pixels (B, 3, S, S) in [-1, 1], S = 64 if `small` else 128, and prompt rows."""
        pictures, prompts = zip(*(self.draw(rng) for _ in range(count)), strict=True)
        tensors = [torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures]
        if small:
            tensors = [_random_crop(picture, rng) for picture in tensors]
        return torch.stack(tensors) * 2 - 1, list(prompts)


class LinearAttention:
    """SANA's self attention without the padded row of values and without float32: a third of the time on a CPU."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: None = None, attention_mask: None = None
    ) -> Tensor:
        """diffusers' processor protocol: (B, T, D) to (B, T, D)."""
        query, key, value = (_heads(layer(hidden_states), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key = query.relu(), key.relu()
        numerator = query @ (key.transpose(-1, -2) @ value)
        denominator = (query.float() * key.float().sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
        return attn.to_out[0]((numerator / denominator.to(numerator.dtype)).transpose(1, 2).flatten(2))


class CrossAttention:
    """Cross attention as two products and a softmax: on a CPU the masked flash kernel in bfloat16 is ten times slower."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """diffusers' processor protocol: (B, T, D), (B, L, D), mask (B, 1, L) to (B, T, D)."""
        query = _heads(attn.to_q(hidden_states), attn.heads)
        key, value = (_heads(layer(encoder_hidden_states), attn.heads) for layer in (attn.to_k, attn.to_v))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + attention_mask[:, None].to(query.dtype)
        return attn.to_out[0]((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def _heads(states: Tensor, num_heads: int) -> Tensor:
    return states.unflatten(2, (num_heads, -1)).transpose(1, 2)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest: on these sizes Muon needs about half the steps."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and name.startswith("transformer_blocks.") and "scale_shift" not in name
        (matrices if is_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, weight_decay=0.01, betas=(0.9, 0.98)),
    ]


def rate_factor(step: int, share_done: float) -> float:
    """Warm-up by steps, then constant, then linear to zero over the last part of the time."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.0, (1 - share_done) / DECAY_SHARE))


class Pretraining:
    """The state of a run: model, average, optimizers, random numbers, time spent."""

    def __init__(self, model: Any, vae: PCAAutoencoder, pictures: World, seed: int) -> None:
        self.model: Any = model
        self.average: Any = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.train().requires_grad_(True)
        # bfloat16 weights and activations halve the traffic of the element-wise operators; the master stays float32.
        self.worker: Any = copy.deepcopy(model).to(torch.bfloat16)
        for block in self.worker.transformer_blocks:
            block.attn1.set_processor(LinearAttention())
            block.attn2.set_processor(CrossAttention())
        self.vae, self.world = vae, pictures
        self.optimizers = make_optimizers(self.model)
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.rng, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.step, self.seconds = 0, 0.0

    def train_step(self, states: Tensor, masks: Tensor, share_done: float, batch: int = BATCH) -> float:
        """One update; returns the loss. `states` (P, L, C) and `masks` (P, L) are those of the world's prompts."""
        factor = rate_factor(self.step, share_done)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        small = bool(self.rng.random() < SMALL_SHARE)
        pixels, prompts = self.world.batch(self.rng, 2 * batch if small else batch, small)
        latents = self.vae.encode(pixels).latents
        sigmas = torch.sigmoid(torch.randn(len(latents), generator=self.generator) * SIGMA_DEVIATION + SIGMA_MEAN)
        noise = torch.randn(latents.shape, generator=self.generator)
        share = sigmas.view(-1, 1, 1, 1)
        masters, workers = list(self.model.parameters()), list(self.worker.parameters())
        with torch.no_grad():
            torch._foreach_copy_(workers, masters)
        prediction = self.worker(
            ((1 - share) * latents + share * noise).to(torch.bfloat16),
            encoder_hidden_states=states[prompts],
            encoder_attention_mask=masks[prompts],
            timestep=sigmas * 1000,
        ).sample
        loss = (prediction.float() - (noise - latents)).pow(2).mean()
        loss.backward()
        for master, worker in zip(masters, workers, strict=True):
            master.grad, worker.grad = worker.grad.float(), None
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Writes everything a resume needs, atomically."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.bit_generator.state,
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
        }
        with atomic_path(path) as temp:
            torch.save(state, temp)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint of `save`."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = state["rng"]
        self.generator.set_state(state["generator"])
        self.step, self.seconds = state["step"], state["seconds"]

    def publish(self, folder: Path) -> None:
        """Writes the averaged weights as `folder/transformer`, float16."""
        temp, target = folder / "transformer.partial", folder / "transformer"
        target.mkdir(exist_ok=True)
        copy.deepcopy(self.average).half().save_pretrained(temp)
        for path in temp.iterdir():
            path.chmod(0o644)
            path.replace(target / path.name)
        temp.rmdir()


def main() -> None:
    """Trains until the time is up, from the published weights or from the checkpoint of an earlier start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120, help="wall-clock limit over all starts")
    parser.add_argument("--work-dir", type=Path, default=Path("build/pretrain"), help="checkpoint and grids")
    parser.add_argument("--every", type=float, default=10, help="minutes between checkpoints")
    parser.add_argument("--from-scratch", action="store_true", help="random weights and a newly fitted autoencoder")
    options = parser.parse_args()
    folder = ModelFolder(EMBEDDED)
    pictures = World(world.vocabulary(), seed=0)
    vae, transformer = folder.load("vae"), folder.load("transformer")
    if options.from_scratch:
        torch.manual_seed(0)
        vae.fit(pictures.batch(np.random.default_rng(0), 400, small=False)[0])
        vae.save_pretrained(FOLDER / "vae")
        transformer = SanaTransformer2DModel(**{k: v for k, v in transformer.config.items() if not k.startswith("_")})
    run = Pretraining(transformer, vae, pictures, seed=0)
    checkpoint = options.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
    states, masks = _prompt_states(folder, pictures.prompts)
    limit_s, losses, last_save = options.minutes * 60, [], time.monotonic()
    clock = time.monotonic() - run.seconds
    while run.seconds < limit_s:
        losses.append(run.train_step(states, masks, run.seconds / limit_s))
        run.seconds = time.monotonic() - clock
        if run.step % 50 == 0:
            rate = run.seconds / run.step
            print(
                f"step {run.step} | loss {np.mean(losses[-200:]):.4f} | {rate:.2f} s a step | {run.seconds / 60:.0f} min",
                flush=True,
            )
        if time.monotonic() - last_save > options.every * 60:
            last_save = time.monotonic()
            run.save(checkpoint)
            save_grid(run.average, options.work_dir / f"grid_{run.step:06d}.png")
    run.save(checkpoint)
    run.publish(FOLDER)
    save_grid(run.average, options.work_dir / "grid_final.png")


def save_grid(transformer: nn.Module, path: Path) -> None:
    """Draws ten trained labels."""
    names = [world.background_names()[i % 16] for i in range(7, 7 + len(GRID_LABELS))]
    prompts = [world.prompt_of(label, name) for label, name in zip(GRID_LABELS, names, strict=True)]
    pictures = draw(
        ModelFolder(EMBEDDED),
        prompts,
        [0] * len(prompts),
        transformer=transformer,
        steps=24,
        guidance=3.0,
        image_side=world.SIDE,
        label="grid",
    )
    half = len(pictures) // 2
    rows = [np.concatenate([np.asarray(picture) for picture in part], 1) for part in (pictures[:half], pictures[half:])]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).save(path)


def _prompt_states(folder: ModelFolder, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """States of all prompts, bfloat16."""
    parts = folder.encode_prompts(prompts)
    return parts.states.to(torch.bfloat16), parts.mask


def _premultiplied(image: Image.Image, side: int) -> np.ndarray:
    pixels = np.asarray(image.resize((side, side), Image.Resampling.LANCZOS), np.float32) / 255
    return np.concatenate([pixels[..., :3] * pixels[..., 3:], pixels[..., 3:]], -1)


def _random_crop(picture: Tensor, rng: np.random.Generator) -> Tensor:
    side = int(rng.choice(CROP_SIDES))
    left, top = (int(value) for value in rng.integers(0, picture.shape[1] - side + 1, 2))
    crop = picture[None, :, top : top + side, left : left + side]
    size = world.SIDE // 2
    return nn.functional.interpolate(crop, (size, size), mode="bilinear", antialias=True, align_corners=False)[0]


if __name__ == "__main__":
    main()
