"""Draws the sample subject: five pictures of a held-out label on five backgrounds.

Reads the npm packages, writes `sample_subject/*.jpg`, a caption `.txt` beside each, and `sample_subject.json`.
One command: `python -m host.tiny_base.subject`.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from host.tiny_base import world
from runtime.atomic import write_json

FOLDER = Path(__file__).parent / "sample_subject"
LABEL = "trophy"
SIDE = 512
BACKGROUNDS = ("a white background", "the grass", "a blue background", "a wooden table", "a sunset")
"""The other eleven are for prompts not seen in training."""
SCALES = (0.9, 0.8, 0.85, 0.75, 0.82)
OFFSETS = ((0, 4), (-20, 16), (16, -8), (0, 24), (24, 8))


def draw_subject(label: str = LABEL) -> list[Image.Image]:
    """The five pictures, 512 x 512 RGB.

    Raises:
        ValueError: The label is not held out, so the model knows it already.
    """
    if label not in world.holdout():
        raise ValueError(f"{label!r} is not held out; choose one of {', '.join(world.holdout())}.")
    (emoji,) = world.load_emoji([label])
    rng = np.random.default_rng(0)
    return [
        world.compose(emoji.image, world.draw_background(name, rng, SIDE), scale, offset)
        for name, scale, offset in zip(BACKGROUNDS, SCALES, OFFSETS, strict=True)
    ]


def write_subject(label: str, folder: Path) -> None:
    """Writes the pictures, their captions and, beside the folder, the record of what was drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (picture, name) in enumerate(zip(draw_subject(label), BACKGROUNDS, strict=True)):
        stem = f"{number}-{name.removeprefix('a ').removeprefix('the ').replace(' ', '-')}"
        picture.save(folder / f"{stem}.jpg", quality=92)
        (folder / f"{stem}.txt").write_text(world.prompt_of(label, name) + "\n")
    record = {
        "label": label,
        "backgrounds": BACKGROUNDS,
        "unseen_backgrounds": [name for name in world.BACKGROUNDS if name not in BACKGROUNDS],
    }
    write_json(folder.with_suffix(".json"), record)


def main() -> None:
    """Writes one subject."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default=LABEL, help="a held-out label")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write")
    options = parser.parse_args()
    write_subject(options.label, options.output)


if __name__ == "__main__":
    main()
