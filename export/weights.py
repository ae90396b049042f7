"""Writes the weights that travel: one safetensors file per middle block, the output layers, and the LoRA's start."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn

from runtime.tensor_file import write_tensor_file

LOSS_FILE = "blocks/output.safetensors"
LORA_FILE = "lora_init.safetensors"


def block_file(index: int) -> str:
    """Name of a block's weight file in the bundle."""
    return f"blocks/{index:03d}.safetensors"


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes one file."""
    write_tensor_file(path, weights, {"format": "pt"})


def lora_layers(block: nn.Module, module_path: str, targets: str | tuple[str, ...]) -> tuple[str, ...]:
    """Layers of a block that get LoRA, chosen as PEFT chooses them.

    Args:
        block: One block; its linear layers and 1x1 convolutions can have LoRA.
        module_path: Its place in the transformer, e.g. `transformer_blocks.4`.
        targets: Names, each the end of a module path; or one regular expression for whole paths; or `all-linear`.

    Returns:
        Names within the block, in the order of its modules.

    Raises:
        ValueError: A target matches a layer that cannot have LoRA, or is no regular expression.
    """
    chosen = []
    for name, module in block.named_modules():
        if targets == "all-linear":
            wanted = isinstance(module, nn.Linear)
        else:
            wanted = bool(check_target_module_exists(_peft_config(targets), f"{module_path}.{name}"))
        if wanted and can_have_lora(module):
            chosen.append(name)
        elif wanted and isinstance(module, nn.Conv2d):
            raise ValueError(
                f"LoRA target {name!r} is a {module.kernel_size[0]}x{module.kernel_size[1]} convolution with "
                f"{module.groups} groups; LoRA is for linear layers and 1x1 convolutions."
            )
    return tuple(chosen)


def can_have_lora(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a 1x1 convolution."""
    pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    return pointwise or isinstance(module, nn.Linear)


def choose_layers(
    blocks: Mapping[str, nn.Module], targets: str | tuple[str, ...], trained: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Layers with LoRA of each trained block, by the block's module path.

    Args:
        blocks: All blocks of the transformer: a target may name layers that only blocks of another kind have.
        targets: As for `lora_layers`.
        trained: Paths of the blocks that are trained.

    Raises:
        ValueError: A target matches no layer of any block, or one that cannot have LoRA; or none matches a trained block.
    """
    layers = {path: lora_layers(block, path, targets) for path, block in blocks.items()}
    found = [f"{path}.{layer}" for path, names in layers.items() for layer in names]
    for target in [targets] if isinstance(targets, str) else targets:
        hits = found if isinstance(targets, str) else [n for n in found if f".{n}".endswith(f".{target}")]
        if not hits:
            raise ValueError(
                f"LoRA target {target!r} matches no layer of any block; their layers are {_candidates(blocks.values())}."
            )
    if not any(layers[path] for path in trained):
        own = _candidates([blocks[path] for path in trained])
        raise ValueError(
            f"lora_targets {targets!r} match no layer of the trained blocks {trained[0]} to {trained[-1]}; their layers are "
            f"{own}. Name some of these, or choose another cut."
        )
    return {path: layers[path] for path in trained}


def _candidates(blocks: Iterable[nn.Module]) -> str:
    return ", ".join(sorted({name for block in blocks for name in lora_candidates(block)}))


def lora_candidates(module: nn.Module) -> list[str]:
    """Paths of all layers in a module that can have LoRA; the meta device is enough."""
    return [name for name, layer in module.named_modules() if can_have_lora(layer)]


@cache
def _peft_config(targets: str | tuple[str, ...]) -> LoraConfig:
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(
                f"lora_targets: got {targets!r}, which is no regular expression ({error}). A single string is one for whole "
                "module paths; give names of layers as a list."
            ) from None
    return LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))


def initial_lora(
    weights: Mapping[str, Tensor], layers: Sequence[str], rank: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """LoRA matrices of one block: A uniform in +-1/sqrt(I) as PEFT draws it (Kaiming with a = sqrt 5), B zero.

    Returns:
        `<layer>.lora_A` (R, I) and `<layer>.lora_B` (O, R), float32.
    """
    require_rank(weights, layers, rank)
    lora = {}
    for layer in layers:
        out_features, in_features = weights[f"{layer}.weight"].shape
        bound = 1 / math.sqrt(in_features)
        lora[f"{layer}.lora_A"] = (torch.rand(rank, in_features, generator=generator) * 2 - 1) * bound
        lora[f"{layer}.lora_B"] = torch.zeros(out_features, rank)
    return lora


def require_rank(weights: Mapping[str, Tensor], layers: Sequence[str], rank: int) -> None:
    """Refuses a rank above the rank a layer of one block can have; the meta device is enough.

    Raises:
        ValueError: Names the layer and its size.
    """
    for layer in layers:
        out_features, in_features = weights[f"{layer}.weight"].shape
        if rank > min(out_features, in_features):
            raise ValueError(
                f"LoRA rank {rank} exceeds the size of {layer}, {out_features} x {in_features}. Lower export.lora_rank."
            )
