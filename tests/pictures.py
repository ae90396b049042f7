"""Small pictures for tests, as files of any kind."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from host.decode import UPRIGHT
from host.photos import PhotoRow, inspect_photos

PROMPT = "a photo of sks dog"
ORIENTATIONS = range(1, 9)
# How a camera stores the upright picture for each orientation: the inverse of what undoes it.
STORED = {
    **UPRIGHT,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}


def scene(width: int = 48, height: int = 32) -> Image.Image:
    """A smooth picture without any symmetry."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, (1 - x) * y * y], -1) * 255).round().astype(np.uint8))


def stored_as(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(STORED[orientation]) if orientation in STORED else image


def exif_with(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def reopened(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, kind, **options)))


def row_of(photos_dir: Path, name: str, **options: Any) -> PhotoRow:
    rows = inspect_photos(photos_dir, **{"min_side": 8, "instance_prompt": PROMPT, **options})
    return next(row for row in rows if row.name == name)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)
