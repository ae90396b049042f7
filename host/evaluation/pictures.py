"""The pictures of an evaluation: each is drawn once, by the base or with an adapter, and found again by what it depends on.

Reads a model and adapters, writes `pictures/*.png`. A picture's name ends with a hash over model, adapter, prompt, seed and
sampler settings, so that an evaluation that was interrupted, or got more seeds or runs, draws only what it has not yet.
Command: `pocketdit evaluate RUN`.
"""

import gc
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from host.cache import stage_key
from host.config import GenerateConfig
from host.generate import decode, denoise, encode_prompts, starting_noise
from host.models import ModelFolder
from host.models.folder import load_lora
from runtime import atomic
from runtime.bundle import sha256_file

CHUNK = 32
"""Pictures drawn before the first of them is saved; encoders, transformer and autoencoder are loaded once a chunk."""
MAX_SLUG = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Artist:
    """What draws: a base, or a base with an adapter."""

    model: ModelFolder
    image_side: int
    """Pixels."""
    max_tokens: int | None
    """Tokens of a prompt, as in the run's export."""
    adapter_path: Path | None = None
    adapter_sha256: str | None = None

    def base(self) -> "Artist":
        """The same without the adapter."""
        return Artist(model=self.model, image_side=self.image_side, max_tokens=self.max_tokens)


def with_adapter(model: ModelFolder, adapter_path: Path, image_side: int, max_tokens: int | None) -> Artist:
    """A base with an adapter, whose file is hashed."""
    return Artist(
        model=model,
        image_side=image_side,
        max_tokens=max_tokens,
        adapter_path=adapter_path,
        adapter_sha256=sha256_file(adapter_path),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One picture to be drawn."""

    artist: Artist
    prompt: str
    seed: int


class PictureStore:
    """The folder of the pictures."""

    def __init__(self, folder: Path, config: GenerateConfig) -> None:
        """Writes nothing yet; of the settings only steps and guidance count."""
        self._folder, self._steps, self._guidance = folder, config.steps, config.guidance

    def path(self, order: Order) -> Path:
        """Where a picture is, or will be."""
        artist = order.artist
        key = stage_key(
            {
                "model": artist.model.sha256(),
                "adapter": artist.adapter_sha256,
                "prompt": order.prompt,
                "seed": order.seed,
                "steps": self._steps,
                "guidance": self._guidance,
                "image_side": artist.image_side,
                "max_tokens": artist.max_tokens,
            }
        )
        slug = re.sub(r"[^a-z0-9]+", "-", order.prompt.lower())[:MAX_SLUG].strip("-")
        who = "adapter" if artist.adapter_sha256 else "base"
        return self._folder / f"{slug}-s{order.seed}-{who}-{key[:16]}.png"

    def missing(self, orders: Iterable[Order]) -> list[Order]:
        """Those not drawn yet, each once: the base's pictures are asked for by every run on it."""
        by_path = {self.path(order): order for order in orders}
        return [order for path, order in by_path.items() if not _is_whole(path)]

    def draw(self, orders: Sequence[Order]) -> None:
        """Draws pictures, a chunk of one artist at a time, and saves each chunk before the next is begun."""
        by_artist: dict[str, list[Order]] = {}
        for order in orders:
            by_artist.setdefault(_identity(order.artist), []).append(order)
        done = 0
        for own in by_artist.values():
            for start in range(0, len(own), CHUNK):
                chunk = own[start : start + CHUNK]
                self._draw(chunk, f"pictures {done + 1} to {done + len(chunk)} of {len(orders)}")
                done += len(chunk)

    def _draw(self, orders: Sequence[Order], label: str) -> None:
        artist = orders[0].artist
        model = artist.model
        encoded = encode_prompts(model, [order.prompt for order in orders], artist.max_tokens)
        noise = starting_noise(model, [order.seed for order in orders], artist.image_side)
        transformer: Any = model.load("transformer")
        if artist.adapter_path is not None:
            load_lora(model.adapter, transformer, artist.adapter_path)
        settings: dict[str, Any] = {"steps": self._steps, "guidance": self._guidance, "label": label}
        latents = denoise(model, transformer, encoded, noise, **settings)
        del transformer, encoded
        gc.collect()
        for order, picture in zip(orders, decode(model.load("vae"), latents), strict=True):
            with atomic.atomic_path(self.path(order)) as temp:
                picture.save(temp, format="PNG")


def _identity(artist: Artist) -> str:
    return json.dumps([artist.model.sha256(), artist.adapter_sha256, artist.image_side, artist.max_tokens])


def _is_whole(path: Path) -> bool:
    """Whether a picture is there and can be read to its end."""
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            picture.load()
    except (OSError, SyntaxError, ValueError):
        return False
    return True
