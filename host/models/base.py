"""What a model family must say about itself, and where its components come from.

A model is a folder in diffusers' layout (`model_index.json`, one subfolder a component) or a hub id. Components are
loaded one at a time and freed by the caller.
"""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from export.block_programs import BlockFunction, PredictFunction
from runtime.bundle import sha256_file

EMBEDDED = "tiny-base"
EMBEDDED_DIR = Path(__file__).parents[1] / "tiny_base"
# Libraries a model_index.json may name; anything else would import code that came with a model.
COMPONENT_LIBRARIES = ("diffusers", "transformers", "host.tiny_base")


@dataclass(frozen=True, slots=True)
class PromptStates:
    """What the text encoder makes of prompts.

    Attributes:
        states: (P, L, C) float32.
        mask: (P, L) int64, 1 where a token is real.
    """

    states: Tensor
    mask: Tensor

    def __getitem__(self, rows: Sequence[int]) -> "PromptStates":
        return PromptStates(self.states[list(rows)], self.mask[list(rows)])


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One transformer block: its kind of program and its module path in the transformer."""

    kind: str
    module: str


class ModelAdapter(Protocol):
    """One family of diffusion transformers. `B` samples, `T` tokens, `D` model width, `P` prompts, `L` prompt tokens."""

    family: str
    lora_prefix: str
    """What diffusers' LoRA loader of this family puts before a module path."""
    prompt_inputs: tuple[str, ...]
    """Conditioning that depends on the prompt alone, stored once a prompt."""
    block_conditioning: tuple[str, ...]
    """What the block function takes of the conditioning."""
    predict_conditioning: tuple[str, ...]
    """What the predict function takes of it."""

    def patch_size(self, config: Mapping[str, Any]) -> int:
        """Latent pixels per token, along one side."""

    def encode_prompts(self, tokenizer: Any, text_encoder: Any, prompts: Sequence[str]) -> PromptStates:
        """Prompts to prompt states, exactly as the family's own pipeline does."""

    def blank_prompts(self, config: Mapping[str, Any], tokenizer: Any) -> PromptStates:
        """One prompt of zeros in the shape of `encode_prompts`, without loading the text encoder."""

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: PromptStates
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Everything before the first block: noisy latents (B, C, H, W) and timesteps (B,) to hidden (B, T, D) and the
        conditioning the blocks take, each (B, ...)."""

    def run_block(
        self,
        transformer: Any,
        index: int,
        hidden: Tensor,
        conditioning: Mapping[str, Tensor],
        grid: tuple[int, int],
    ) -> Tensor:
        """Block `index` of diffusers' own module on (B, T, D); `grid` is the tokens' rows and columns."""

    def blocks(self, transformer: Any) -> list[BlockRef]:
        """All blocks in running order."""

    def block_weights(self, transformer: Any, index: int) -> dict[str, Tensor]:
        """Weights of one block under diffusers' names within the block; linear weights as (out, in)."""

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        """The block as a pure function of weights, for export; equals `run_block` for B = 1."""

    def predict_weights(self, transformer: Any) -> dict[str, Tensor]:
        """Weights of what comes after the last block."""

    def predict_function(self, transformer: Any) -> PredictFunction:
        """What comes after the last block, (T, D) to token predictions (T, patch² C)."""

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        """A target (B, C, H, W) in the layout of `predict_function`: (B, T, patch² C)."""

    def denoise(
        self,
        transformer: Any,
        scheduler: Any,
        prompts: PromptStates,
        negative: PromptStates,
        latents: Tensor,
        *,
        steps: int,
        guidance: float,
    ) -> Tensor:
        """Sampling with the family's own diffusers pipeline: noise (B, C, H, W) to latents."""

    def load_lora(self, transformer: Any, adapter_path: Path) -> None:
        """Loads an adapter with diffusers' loader of this family.

        Raises:
            ValueError: Keys of the file match nothing in the transformer.
        """


_ADAPTERS: dict[str, ModelAdapter] = {}


def register_model(transformer_class: str, adapter: ModelAdapter) -> None:
    """Makes `adapter` responsible for transformers of a diffusers class.

    Raises:
        ValueError: The class has an adapter already.
    """
    if transformer_class in _ADAPTERS:
        raise ValueError(f"{transformer_class} is registered already, by {_ADAPTERS[transformer_class].family}.")
    _ADAPTERS[transformer_class] = adapter


class ModelFolder:
    """A model's folder: its adapter, its components on demand.

    Attributes:
        name: As the user gave it.
        dir: The folder.
        adapter: The family's adapter.
        config: The transformer's configuration.
    """

    def __init__(self, model: str) -> None:
        """Finds the model.

        Args:
            model: A folder, a hub id, or `tiny-base` for the embedded model.

        Raises:
            ValueError: There is no such model, it is not in diffusers' layout, or its family has no adapter.
        """
        self.name = model
        self.dir = EMBEDDED_DIR if model == EMBEDDED else _local_dir(model)
        try:
            self._index = json.loads((self.dir / "model_index.json").read_text(encoding="utf-8"))
            self.config = json.loads((self.dir / "transformer" / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.dir} is not a diffusion transformer in diffusers' layout: {error.filename} is missing. Give a folder "
                f"with model_index.json and transformer/, a hub id, or {EMBEDDED!r}."
            ) from None
        name = self.config.get("_class_name")
        if name not in _ADAPTERS:
            raise ValueError(f"{model}: no adapter for {name!r}; supported: {', '.join(sorted(_ADAPTERS))}.")
        self.adapter = _ADAPTERS[name]

    def adapter_file(self) -> str | None:
        """Source file of the adapter: what it says of a block is part of the programs' cache key."""
        return inspect.getsourcefile(type(self.adapter))

    def load(self, component: str) -> Any:
        """Loads one component (`transformer`, `vae`, `text_encoder`, `tokenizer`, `scheduler`), ready for inference.

        Raises:
            ValueError: model_index.json does not name it, or names code outside diffusers, transformers and PocketDiT.
        """
        entry = self._index.get(component)
        if not entry:
            raise ValueError(f"{self.dir}/model_index.json names no {component!r}.")
        library, class_name = entry
        if not any(library == allowed or library.startswith(f"{allowed}.") for allowed in COMPONENT_LIBRARIES):
            raise ValueError(
                f"{self.dir}: {component} wants code from {library!r}; only {COMPONENT_LIBRARIES} are imported."
            )
        loaded = getattr(importlib.import_module(library), class_name).from_pretrained(self.dir, subfolder=component)
        if isinstance(loaded, nn.Module):
            if any(parameter.dtype != torch.float32 for parameter in loaded.parameters()):
                loaded = loaded.to(torch.float32)
            loaded.eval().requires_grad_(False)
        return loaded

    def sha256(self, component: str = "transformer") -> str:
        """Hash over a component's configuration and weights."""
        digest = hashlib.sha256(json.dumps(self._index.get(component)).encode())
        for path in sorted((self.dir / component).glob("*")):
            if path.is_file():
                digest.update(f"{path.name} {sha256_file(path)}\n".encode())
        return digest.hexdigest()


def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Pixels (B, 3, H, W) in [-1, 1] to latents (B, C, H/f, W/f), shifted and scaled as the transformer expects."""
    output = vae.encode(pixels)
    if hasattr(output, "latent_dist"):
        latents = output.latent_dist.mode()
    else:
        latents = output.latents if hasattr(output, "latents") else output.latent
    return (latents - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `encode_images`; pixels clamped to [-1, 1]."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return vae.decode(latents / vae.config.scaling_factor + shift).sample.clamp(-1, 1)


def spatial_factor(vae: Any) -> int:
    """Pixels per latent along one side, measured: configurations name it differently."""
    side = 64
    with torch.no_grad():
        return side // encode_images(vae, torch.zeros(1, 3, side, side)).shape[-1]


def _local_dir(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"Model {model!r} is neither a folder here nor a hub id (owner/name) nor {EMBEDDED!r}.")
    download: Callable[..., str] = importlib.import_module("huggingface_hub").snapshot_download
    try:
        return Path(download(model, allow_patterns=["*.json", "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt"]))
    except Exception as error:
        raise ValueError(
            f"Model {model!r} is not a folder here and the hub did not give it ({type(error).__name__}: {error}). "
            f"Check the id, log in if it is gated, or give a local folder."
        ) from error
