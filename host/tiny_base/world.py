"""The world the embedded model knows: an emoji on one of 16 drawn backgrounds, with a prompt that says so.

Reads the npm packages of `corpus_dir`, or fetches them with `npm pack`. Everything drawn follows from a numpy Generator.
"""

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from host.cache import cache_dir

SIDE = 128
EMOJI_PACKAGE, LABEL_PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0", "emojibase-data@17.0.0"
FOLDER = Path(__file__).parent
Painter = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Emoji:
    """An object of the world: its label and its picture, RGBA."""

    label: str
    image: Image.Image


def prompt_of(label: str, background: str) -> str:
    """The prompt of a picture."""
    return f"a 3d emoji of a {label} on {background}"


def holdout() -> list[str]:
    """The 16 labels that are never trained on; subjects are made from them."""
    return json.loads((FOLDER / "holdout.json").read_text())


def vocabulary() -> list[str]:
    """The labels the model is trained on.

    Raises:
        AssertionError: A held-out label is among them.
    """
    labels = json.loads((FOLDER / "vocabulary.json").read_text())
    assert not set(labels) & set(holdout()), "the vocabulary holds held-out labels"
    return labels


def corpus_dir() -> Path:
    """Folder of the unpacked packages, fetched by name on the first call; $POCKETDIT_CORPUS overrides it.

    Raises:
        ValueError: npm is missing or did not give the packages.
    """
    folder = Path(os.environ.get("POCKETDIT_CORPUS") or cache_dir() / "corpus")
    for name, package in (("emoji", EMOJI_PACKAGE), ("labels", LABEL_PACKAGE)):
        if (folder / name).is_dir():
            continue
        temp = folder / f"{name}.partial"
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        try:
            command = ["npm", "pack", "--silent", package]
            done = subprocess.run(command, cwd=temp, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"`npm pack {package}` failed ({error}); the tiny world is drawn from it. Install npm."
            ) from None
        with tarfile.open(temp / done.stdout.split()[-1]) as archive:
            archive.extractall(temp, filter="data")
        (temp / "package").rename(folder / name)
        shutil.rmtree(temp)
    return folder


def load_emoji(labels: Sequence[str]) -> list[Emoji]:
    """Pictures of the given labels.

    Raises:
        ValueError: A label has no picture.
    """
    folder = corpus_dir()
    codes = {e["label"]: e["hexcode"].lower() for e in json.loads((folder / "labels/en/data.json").read_text())}
    found = []
    for label in labels:
        names = [
            f"{codes.get(label)}{suffix}.webp" for suffix in ("", "-fe0f")
        ]  # some names carry a variation selector
        path = next((p for name in names if (p := folder / "emoji/assets" / name).is_file()), None)
        if path is None:
            raise ValueError(f"No emoji for the label {label!r} in {EMOJI_PACKAGE}.")
        found.append(Emoji(label, Image.open(path).convert("RGBA")))
    return found


def compose(emoji: Image.Image, background: np.ndarray, scale: float, offset: tuple[int, int]) -> Image.Image:
    """Lays an emoji on a background.

    Args:
        emoji: RGBA.
        background: (S, S, 3) uint8.
        scale: Side of the emoji over that of the picture.
        offset: Shift of its centre from the picture's, pixels right and down; kept inside the picture.
    """
    canvas = Image.fromarray(background)
    side = max(1, round(canvas.width * scale))
    left, top = (int(np.clip((canvas.width - side) // 2 + shift, 0, canvas.width - side)) for shift in offset)
    small = emoji.resize((side, side), Image.Resampling.LANCZOS)
    canvas.paste(small, (left, top), small)
    return canvas


def draw_background(name: str, rng: np.random.Generator, side: int = SIDE) -> np.ndarray:
    """A background, (side, side, 3) uint8."""
    return np.clip(BACKGROUNDS[name](rng, side), 0, 255).astype(np.uint8)


def _flat(color: tuple[int, int, int], jitter: float = 12) -> Painter:
    def paint(rng: np.random.Generator, side: int) -> np.ndarray:
        return np.broadcast_to(_shade(rng, color, jitter), (side, side, 3)).copy()

    return paint


def _shade(rng: np.random.Generator, color: tuple[int, int, int], jitter: float = 12) -> np.ndarray:
    return np.clip(np.array(color, np.float32) + rng.normal(0, jitter, 3).astype(np.float32), 0, 255)


def _fade(rng: np.random.Generator, top: tuple[int, int, int], bottom: tuple[int, int, int], side: int) -> np.ndarray:
    share = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
    rows = _shade(rng, top) * (1 - share) + _shade(rng, bottom) * share
    return np.broadcast_to(rows, (side, side, 3)).copy()


def _mottle(rng: np.random.Generator, cells: int, strength: float, side: int) -> np.ndarray:
    """Smooth noise of `cells` x `cells` blobs, (side, side, 1)."""
    coarse = Image.fromarray(rng.standard_normal((cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))[..., None] * strength


def _dots(rng: np.random.Generator, image: np.ndarray, count: int, largest: int) -> None:
    unit = image.shape[0] / SIDE
    for _ in range(count):
        x, y = rng.integers(0, image.shape[0] - 2, 2)
        width, height = np.maximum(1, (rng.integers(1, largest + 1, 2) * unit).astype(int))
        image[y : y + height, x : x + width] = 255


def _grass(rng: np.random.Generator, side: int) -> np.ndarray:
    image, horizon = _fade(rng, (120, 190, 250), (200, 230, 255), side), int(side * rng.uniform(0.35, 0.6))
    image[horizon:] = (_shade(rng, (70, 160, 60)) + _mottle(rng, 40, 14, side))[horizon:]
    return image


def _beach(rng: np.random.Generator, side: int) -> np.ndarray:
    image, sea = _fade(rng, (110, 190, 250), (190, 225, 250), side), int(side * rng.uniform(0.3, 0.45))
    sand = sea + int(side * rng.uniform(0.1, 0.2))
    image[sea:sand] = _shade(rng, (30, 120, 190))
    image[sand:] = (_shade(rng, (235, 210, 150)) + _mottle(rng, 50, 8, side))[sand:]
    return image


def _night(rng: np.random.Generator, side: int) -> np.ndarray:
    image = _fade(rng, (8, 8, 40), (30, 25, 80), side)
    _dots(rng, image, int(rng.integers(25, 60)), 2)
    return image


def _snow(rng: np.random.Generator, side: int) -> np.ndarray:
    image, horizon = _fade(rng, (150, 180, 210), (220, 230, 240), side), int(side * rng.uniform(0.45, 0.65))
    image[horizon:] = (_shade(rng, (245, 248, 252), 4) + _mottle(rng, 20, 4, side))[horizon:]
    _dots(rng, image, 40, 2)
    return image


def _wood(rng: np.random.Generator, side: int) -> np.ndarray:
    unit = side / SIDE
    rows = np.arange(side, dtype=np.float32)[:, None, None] / unit
    grain = np.sin(rows / rng.uniform(2, 5) + _mottle(rng, 6, 2, side)) * 14
    image = _shade(rng, (165, 110, 60)) + grain
    gap = max(1, int(2 * unit))
    for row in range(int(rng.integers(8, 20) * unit), side, int(rng.integers(24, 36) * unit)):
        image[row : row + gap] *= 0.6
    return image


def _bricks(rng: np.random.Generator, side: int) -> np.ndarray:
    unit = side / SIDE
    image = _shade(rng, (170, 75, 60)) + _mottle(rng, 60, 6, side)
    height, gap = int(rng.integers(14, 20) * unit), max(1, int(2 * unit))
    for course, row in enumerate(range(0, side, height)):
        image[row : row + gap] = 205
        for column in range((course % 2) * height, side, 2 * height):
            image[row : row + height, column : column + gap] = 205
    return image


def _sunset(rng: np.random.Generator, side: int) -> np.ndarray:
    image, unit = _fade(rng, (90, 50, 130), (255, 150, 70), side), side / SIDE
    y, x = np.mgrid[0:side, 0:side]
    center_x, center_y, radius = rng.uniform(0.2, 0.8) * side, rng.uniform(0.5, 0.75) * side, rng.uniform(10, 18) * unit
    image[(x - center_x) ** 2 + (y - center_y) ** 2 < radius**2] = (255, 225, 130)
    ground = int(side * rng.uniform(0.75, 0.85))
    image[ground:] = _shade(rng, (50, 30, 60))
    return image


def _checkers(rng: np.random.Generator, side: int) -> np.ndarray:
    cell = int(rng.integers(12, 22) * side / SIDE)
    y, x = np.mgrid[0:side, 0:side]
    light = ((x // cell + y // cell) % 2)[..., None]
    return _shade(rng, (250, 250, 250), 4) * light + _shade(rng, (40, 40, 45), 6) * (1 - light)


def _water(rng: np.random.Generator, side: int) -> np.ndarray:
    y, x = np.mgrid[0:side, 0:side][..., None].astype(np.float32) * SIDE / side
    return _fade(rng, (20, 110, 190), (5, 40, 110), side) + np.sin(x / 9 + _mottle(rng, 5, 3, side) + y / 5) * 9


BACKGROUNDS: dict[str, Painter] = {
    "a white background": _flat((250, 250, 250), 4),
    "a red background": _flat((215, 50, 50)),
    "a blue background": _flat((50, 90, 215)),
    "a green background": _flat((50, 170, 80)),
    "a yellow background": _flat((245, 215, 60)),
    "a pink background": _flat((245, 150, 190)),
    "a black background": _flat((18, 18, 20), 5),
    "the grass": _grass,
    "the beach": _beach,
    "a starry night sky": _night,
    "the snow": _snow,
    "a wooden table": _wood,
    "a brick wall": _bricks,
    "a sunset": _sunset,
    "a checkerboard": _checkers,
    "deep water": _water,
}


@cache
def background_names() -> tuple[str, ...]:
    """The 16 backgrounds, as prompts name them."""
    return tuple(BACKGROUNDS)
