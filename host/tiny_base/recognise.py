"""Does the embedded model draw what it is asked for? 100 trained prompts, ranked by EfficientNet-Lite2 features.

Reads this folder's weights and the npm packages. One command: `python -m host.tiny_base.recognise`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from host.features import lite2_features
from host.generate import draw
from host.models import EMBEDDED, ModelFolder
from host.tiny_base import world

NUM_PROMPTS = 100
REFERENCE_SCALE = 0.86


def recognise(
    model: ModelFolder, seed: int = 0, steps: int = 24, guidance: float = 3.0
) -> tuple[dict[str, Any], list[Image.Image]]:
    """Draws 100 prompts and looks for each picture's label among all trained labels.

    The references of a prompt are all trained labels on that prompt's own background, so a right background earns nothing.

    Args:
        model: The embedded model or another training state of it.
        seed: Chooses labels, backgrounds and noise.
        steps: Denoising steps.
        guidance: Classifier-free guidance.

    Returns:
        `top1` and `top5` accuracy, the number of labels, the prompts with their ranks; and the pictures.
    """
    rng = np.random.default_rng(seed)
    labels = world.vocabulary()
    chosen = [labels[i] for i in rng.permutation(len(labels))[:NUM_PROMPTS]]
    names = [world.background_names()[i % len(world.BACKGROUNDS)] for i in range(len(chosen))]
    prompts = [world.prompt_of(label, name) for label, name in zip(chosen, names, strict=True)]
    pictures = draw(
        model,
        prompts,
        list(range(seed, seed + len(prompts))),
        transformer=model.load("transformer"),
        steps=steps,
        guidance=guidance,
        image_side=world.SIDE,
        label="pictures",
    )
    features = lite2_features(pictures)
    emoji = world.load_emoji(labels)
    ranks = np.zeros(len(prompts), int)
    for name in world.BACKGROUNDS:
        background = world.draw_background(name, np.random.default_rng(seed))
        references = lite2_features([world.compose(e.image, background, REFERENCE_SCALE, (0, 0)) for e in emoji])
        for row in (i for i, other in enumerate(names) if other == name):
            order = np.argsort(-(references @ features[row]))
            ranks[row] = int(np.flatnonzero(order == labels.index(chosen[row]))[0])
    result = {
        "top1": float((ranks < 1).mean()),
        "top5": float((ranks < 5).mean()),
        "labels": len(labels),
        "prompts": [{"prompt": prompt, "rank": int(rank) + 1} for prompt, rank in zip(prompts, ranks, strict=True)],
    }
    return result, pictures


def main() -> None:
    """Prints the accuracies and, if asked, writes a grid of the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="folder of another training state")
    parser.add_argument("--grid", type=Path, help="write the first 40 pictures as one PNG")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    result, pictures = recognise(ModelFolder(options.model))
    print(
        f"top 1: {result['top1']:.0%}, top 5: {result['top5']:.0%} of {NUM_PROMPTS} prompts among {result['labels']} labels"
    )
    if options.grid:
        rows = [np.concatenate([np.asarray(p) for p in pictures[i : i + 8]], 1) for i in range(0, 40, 8)]
        Image.fromarray(np.concatenate(rows)).save(options.grid)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
