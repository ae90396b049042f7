"""Which of the 16 backgrounds does a picture of the tiny world have? Prompt fidelity of the embedded model, without CLIP.

Reads the npm packages of `world.corpus_dir` and the embedded autoencoder, writes `classifier.safetensors` into the cache.
A multinomial logistic regression on the mean and the deviation of each colour in 8 x 8 cells; trained on the trained labels
on every background, as the autoencoder gives them back; tested on the held-out labels, which subjects are made of.
One command: `python -m host.tiny_base.backgrounds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from host.cache import cached_stage
from host.models import EMBEDDED, ModelFolder
from host.models.base import decode_latents, encode_images
from host.tiny_base import world
from runtime.bundle import sha256_file

CELLS = 8
"""Along one side. 8 and 16 are alike, 4 is right on 0.2 points less of the held-out pictures."""
DECAY = 1e-3
SCALES, SHIFT = (0.7, 0.92), 8
"""Side of the emoji over that of the picture, and the most its centre is off, pixels."""
TRAIN_VARIANTS, TEST_VARIANTS = 2, 8
"""Pictures of each label on each background."""
MAX_STEPS = 200
BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundClassifier:
    """Logistic regression."""

    weight: Tensor
    """(2 * 3 * CELLS * CELLS, 16), for features as they are."""
    bias: Tensor
    """(16,)."""
    accuracy: float
    """On pictures of the held-out labels."""
    tested: int
    """How many these were."""

    def probabilities(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Of the 16 backgrounds in the order of `background_names`, (N, 16); pictures of any size."""
        small = [image.convert("RGB").resize((world.SIDE, world.SIDE), Image.Resampling.BICUBIC) for image in images]
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in small])).permute(0, 3, 1, 2)
        return (_cells(pixels) @ self.weight + self.bias).softmax(1).numpy()


def backgrounds_of(prompts: Sequence[str]) -> list[str | None]:
    """The background each prompt names in the world's own words; None where it names none of the 16."""
    return [next((name for name in world.background_names() if _is_form(prompt, name)), None) for prompt in prompts]


def background_scores(
    classifier: BackgroundClassifier, images: Sequence[Image.Image], backgrounds: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """How well pictures show the backgrounds they should.

    Returns:
        The probability of the named background, (N,), and 1 where it is the likeliest of the 16, else 0, (N,).
    """
    probabilities = classifier.probabilities(images)
    rows = [world.background_names().index(name) for name in backgrounds]
    named = probabilities[np.arange(len(rows)), rows]
    return named, (probabilities.argmax(1) == rows).astype(np.float64)


@cache
def load_classifier() -> BackgroundClassifier:
    """Makes the classifier (about 25 s) or takes it from the cache; the same files give the same one.

    Raises:
        ValueError: The packages with the emoji cannot be had.
    """
    sources = [Path(__file__), Path(world.__file__), world.FOLDER / "vocabulary.json", world.FOLDER / "holdout.json"]
    parts = {
        "files": [sha256_file(path) for path in sources],
        "vae": ModelFolder(EMBEDDED).sha256("vae"),
        "packages": [world.EMOJI_PACKAGE, world.LABEL_PACKAGE],
    }
    folder, _ = cached_stage("backgrounds", parts, _build)
    state = load_file(folder / "classifier.safetensors")
    return BackgroundClassifier(
        weight=state["weight"],
        bias=state["bias"],
        accuracy=float(state["accuracy"]),
        tested=int(state["tested"]),
    )


def _is_form(prompt: str, background: str) -> bool:
    start, end = world.prompt_of("\0", background).split("\0")
    return prompt.startswith(start) and prompt.endswith(end) and len(prompt) > len(start) + len(end)


def _build(folder: Path) -> None:
    features, rows = _examples(world.vocabulary(), TRAIN_VARIANTS, seed=0)
    weight, bias = fit(features, rows)
    tested, true_rows = _examples(world.holdout(), TEST_VARIANTS, seed=1)
    accuracy = ((tested @ weight + bias).argmax(1) == true_rows).double().mean()
    state = {"weight": weight, "bias": bias, "accuracy": accuracy, "tested": torch.tensor(len(true_rows))}
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "classifier.safetensors")


def fit(features: Tensor, rows: Tensor, decay: float = DECAY) -> tuple[Tensor, Tensor]:
    """Fits the regression with L-BFGS on standardised features.

    Args:
        features: (N, F).
        rows: (N,) numbers of the backgrounds.
        decay: Weight of the squared norm.

    Returns:
        Weight (F, 16) and bias (16,), for features as they are.
    """
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    standardised = (features - mean) / deviation
    count = len(world.background_names())
    weight = torch.zeros(features.shape[1], count, requires_grad=True)
    bias = torch.zeros(count, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=MAX_STEPS, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(standardised @ weight + bias, rows) + decay * weight.square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    scaled = weight.detach() / deviation[:, None]
    return scaled, bias.detach() - mean @ scaled


def _examples(labels: Sequence[str], variants: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (N, F) and numbers of the backgrounds (N,) of composed pictures that went through the autoencoder."""
    rng = np.random.default_rng(seed)
    vae = ModelFolder(EMBEDDED).load("vae")
    rows = [row for row in range(len(world.background_names())) for _ in range(variants)]
    features = []
    for emoji in world.load_emoji(labels):
        pictures = [_compose(emoji.image, world.background_names()[row], rng) for row in rows]
        pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            back = torch.cat([decode_latents(vae, encode_images(vae, part)) for part in pixels.split(BATCH)])
        features.append(_cells(((back + 1) * 127.5).round()))
    return torch.cat(features), torch.tensor(rows * len(labels))


def _compose(emoji: Image.Image, background: str, rng: np.random.Generator) -> np.ndarray:
    offset = (int(rng.integers(-SHIFT, SHIFT + 1)), int(rng.integers(-SHIFT, SHIFT + 1)))
    return np.asarray(world.compose(emoji, world.draw_background(background, rng), rng.uniform(*SCALES), offset))


def _cells(pixels: Tensor) -> Tensor:
    """Pixels (N, 3, S, S) in 0..255 to mean and deviation of each colour in each cell, (N, 2 * 3 * CELLS * CELLS)."""
    side = pixels.shape[-1] // CELLS
    cells = (pixels.float() / 255).unfold(2, side, side).unfold(3, side, side).flatten(4)
    return torch.cat([cells.mean(-1).flatten(1), cells.std(-1).flatten(1)], 1)


def main() -> None:
    """Prints the accuracy."""
    classifier = load_classifier()
    print(
        f"{classifier.accuracy:.2%} of {classifier.tested} pictures of held-out labels on the right one of "
        f"{len(world.BACKGROUNDS)} backgrounds"
    )


if __name__ == "__main__":
    main()
