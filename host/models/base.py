"""What a model family must say about itself, and what the families' adapters share."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from optimum.utils import NormalizedConfig
from torch import Tensor

from export.block_programs import BlockFunction, PredictFunction, Tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptStates:
    """What the text encoders make of prompts.

    Attributes:
        states: (P, L, C) float32.
        mask: (P, L) int64, 1 where a token is real.
        pooled: (P, C') float32, one vector a prompt, where the family has one.
    """

    states: Tensor
    mask: Tensor
    pooled: Tensor | None = None

    def __getitem__(self, rows: Sequence[int]) -> "PromptStates":
        index = list(rows)
        return PromptStates(self.states[index], self.mask[index], None if self.pooled is None else self.pooled[index])

    def to(self, device: torch.device | str) -> "PromptStates":
        """The same on another device."""
        pooled = None if self.pooled is None else self.pooled.to(device)
        return PromptStates(self.states.to(device), self.mask.to(device), pooled)


class TransformerConfig(NormalizedConfig):
    """A transformer's configuration under the names optimum's exporters use; other names are the configuration's own.

    Latents are (`num_channels`, side, side), `image_size` is the side the family is trained at, and a token is a tile of
    `patch_size` x `patch_size` latents.
    """

    NUM_CHANNELS = "in_channels"
    IMAGE_SIZE = "sample_size"
    PATCH_SIZE = "patch_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """What to encode, and how."""

    texts: list[str]
    config: TransformerConfig
    max_tokens: int | None = None
    """Tokens of a prompt, padding included; None is what the pipeline takes."""
    negative: bool = False
    """The texts are what classifier-free guidance leads away from; some families treat them otherwise."""
    blank: bool = False
    """Zeros of the same shape and the same mask, from the tokenizers alone."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One transformer block: its kind of program and its module path in the transformer."""

    kind: str
    module: str


Sampler = Callable[..., Tensor]


class ModelAdapter(Protocol):
    """One family of diffusion transformers.

    `B` samples, `D` model width, `P` prompts, `L` prompt tokens, `T` image tokens, `S` tokens of the state the blocks hand
    on: image tokens, and before them the prompt's where a family's blocks carry both. `transformer` is diffusers' module,
    with weights or on the meta device, where only shapes count.
    """

    family: str
    pipeline: Any
    """diffusers' pipeline class of this family; it gives prompt handling and the LoRA loader."""
    normalized_config: type[TransformerConfig]
    """Gives the configuration's entries their common names."""
    lora_prefix: str
    """What diffusers' LoRA loader of this family puts before a module path."""
    prompt_inputs: tuple[str, ...]
    """Program inputs that depend on the prompt alone, stored once a prompt."""
    per_block_inputs: tuple[str, ...]
    """Program inputs that differ from block to block, stored for each middle block."""
    predict_inputs: tuple[str, ...]
    """What the predict function takes of the conditioning."""

    def takes_negative(self, config: TransformerConfig) -> bool:
        """Whether sampling takes a negative prompt; guidance-distilled models do not."""

    def encode_prompts(self, load: Callable[[str], Any], request: PromptRequest) -> PromptStates:
        """Prompts to prompt states, exactly as the family's own pipeline does, but no longer than the longest needs.

        Gradients reach the encoders where they are wanted: textual inversion learns a token.

        Args:
            load: Loads a component by name; encoders are loaded one at a time.
            request: What to encode, and how.

        Raises:
            ValueError: A prompt is longer than the encoder takes.
        """

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: PromptStates, guidance: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Everything before the first block.

        Args:
            transformer: The base.
            latents: (B, C, H, W), noisy.
            timesteps: (B,), 0 to 1000.
            prompts: B prompts.
            guidance: Of guidance-distilled models; others ignore it.

        Returns:
            The state (B, S, D), and the conditioning of blocks and predict function, each (B, ...).

        Raises:
            ValueError: The configuration has a feature the block function lacks.
        """

    def run_block(
        self, transformer: Any, index: int, hidden: Tensor, conditioning: Tensors, grid: tuple[int, int]
    ) -> Tensor:
        """Block `index` of diffusers' own module on (B, S, D); `grid` is the image tokens' rows and columns."""

    def blocks(self, transformer: Any) -> list[BlockRef]:
        """All blocks in running order."""

    def mask_text(self, transformer: Any, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """While it is open, the image tokens attend to no prompt token in these blocks; prompt tokens attend as ever.

        It acts on diffusers' own modules, in the pipeline too, with or without LoRA in them; in a batch with a negative
        prompt both halves are masked.
        """

    def block_inputs(
        self, transformer: Any, index: int, conditioning: Tensors, layers: Sequence[str]
    ) -> dict[str, Tensor]:
        """What the program of block `index` takes besides state and weights, each (B, ...); `layers` have LoRA."""

    def block_weights(self, transformer: Any, index: int, layers: Sequence[str]) -> dict[str, Tensor]:
        """Weights the program of a block takes, under diffusers' names within the block; linear weights as (out, in)."""

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        """The block as a pure function of weights, for export; equals `run_block` for B = 1."""

    def run_output(self, transformer: Any, hidden: Tensor, conditioning: Tensors) -> Tensor:
        """diffusers' own layers after the last block: image tokens (B, T, D) to their predictions (B, T, patch² C)."""

    def predict_weights(self, transformer: Any) -> dict[str, Tensor]:
        """Weights of what comes after the last block."""

    def predict_function(self, transformer: Any) -> PredictFunction:
        """What comes after the last block as a pure function of weights, for export; equals `run_output` for B = 1."""

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        """A target (B, C, H, W) in the layout of `predict_function`: (B, T, patch² C)."""

    def sample(
        self, run: Sampler, prompts: PromptStates, negative: PromptStates | None, latents: Tensor, steps: int
    ) -> Tensor:
        """Samples latents (B, C, H, W) from noise of that shape.

        Args:
            run: The family's diffusers pipeline; takes its inputs by keyword and gives what it calls latents.
            prompts: B prompts.
            negative: B negative prompts where the model takes them.
            latents: The noise.
            steps: Denoising steps `run` will take.
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


def adapter_of(transformer_class: str | None, model: str) -> ModelAdapter:
    """The adapter of a diffusers class.

    Raises:
        ValueError: There is none; lists the classes there are.
    """
    if transformer_class not in _ADAPTERS:
        raise ValueError(f"{model}: no adapter for {transformer_class!r}; supported: {', '.join(sorted(_ADAPTERS))}.")
    return _ADAPTERS[transformer_class]


@contextmanager
def swapped_processors(attentions: Iterable[Any], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Gives diffusers' attention modules other processors, made by `wrap` from their own, until the context ends."""
    own = [(attention, attention.processor) for attention in attentions]
    try:
        for attention, processor in own:
            attention.processor = wrap(processor)
        yield
    finally:
        for attention, processor in own:
            attention.processor = processor


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


def tile_tokens(velocity: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) cut into tiles, channels last within a tile: (B, T, patch_size² C)."""
    tiles = velocity.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    return tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def spatial_factor(vae: Any, channels: int) -> int:
    """Pixels per latent along one side, measured: configurations name it differently.

    Args:
        vae: On the meta device.
        channels: Of the latents the transformer takes.

    Raises:
        ValueError: The autoencoder's latents have not as many channels as the transformer takes.
    """
    side = 64
    with torch.no_grad():
        shape = encode_images(vae, torch.zeros(1, 3, side, side, device="meta")).shape
    if shape[1] != channels:
        raise ValueError(
            f"The autoencoder makes latents of {shape[1]} channels, the transformer takes {channels}. They belong to "
            "different models; check the folders vae/ and transformer/."
        )
    return side // shape[-1]


def require_short(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> None:
    """Refuses prompts that an encoder would cut.

    Raises:
        ValueError: Names the prompt and both lengths.
    """
    for prompt in prompts:
        if (length := len(tokenizer(prompt).input_ids)) > max_tokens:
            more = " or raise export.prompt_tokens" if max_tokens < tokenizer.model_max_length else ""
            raise ValueError(
                f"The prompt {prompt!r} has {length} tokens, the model takes {max_tokens}. Shorten the prompt{more}."
            )


def warn_where_cut(tokenizer: Any, prompts: Sequence[str]) -> None:
    """Warns of prompts that CLIP reads in part; FLUX and SD3 have T5 for the rest."""
    for prompt in prompts:
        if (length := len(tokenizer(prompt).input_ids)) > tokenizer.model_max_length:
            _warn_once(
                f"The prompt {prompt!r} has {length} tokens, CLIP reads the first {tokenizer.model_max_length}: the rest "
                "reaches the model through T5 alone. Shorten the prompt to have all of it in both."
            )


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


class BlankEncoder:
    """Stands in for a text encoder where only shapes and masks count."""

    dtype = torch.float32

    def __init__(self, channels: int) -> None:
        """Width of the states."""
        self._channels = channels

    def __call__(self, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        """Zeros (B, L, C)."""
        return (torch.zeros(*input_ids.shape, self._channels),)


def required_components(pipeline_class: Any) -> list[str]:
    """Names of the components a diffusers pipeline cannot do without."""
    parameters = inspect.signature(pipeline_class.__init__).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name != "self"]


def bare_pipeline(pipeline_class: Any, **components: Any) -> Any:
    """A diffusers pipeline with only the given components, quiet."""
    pipeline = pipeline_class(**(dict.fromkeys(required_components(pipeline_class)) | components))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
