"""Writes the weights that travel: one safetensors file per middle block, the output layers, and the LoRA's start."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from runtime.tensor_file import write_tensor_file

LOSS_FILE = "blocks/output.safetensors"
LORA_FILE = "lora_init.safetensors"


def block_file(index: int) -> str:
    """Name of a block's weight file in the bundle."""
    return f"blocks/{index:03d}.safetensors"


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes one file, float32."""
    write_tensor_file(path, {name: value.detach().float() for name, value in weights.items()}, {"format": "pt"})


def lora_layers(weights: Mapping[str, Tensor], targets: Iterable[str]) -> list[str]:
    """Linear layers of a block that get LoRA: those whose name equals a target or ends with `.target`, as in PEFT.

    Raises:
        ValueError: A target matches no linear layer; the message lists the layers there are.
    """
    layers = [n.removesuffix(".weight") for n, w in weights.items() if n.endswith(".weight") and w.ndim == 2]
    chosen = set()
    for target in targets:
        matched = [layer for layer in layers if layer == target or layer.endswith(f".{target}")]
        if not matched:
            raise ValueError(
                f"LoRA target {target!r} matches no layer of the block; its layers are {', '.join(layers)}."
            )
        chosen.update(matched)
    return [layer for layer in layers if layer in chosen]


def initial_lora(
    weights: Mapping[str, Tensor], layers: Sequence[str], rank: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """LoRA matrices of one block: A uniform in +-1/sqrt(I) as PEFT draws it (Kaiming with a = sqrt 5), B zero.

    Returns:
        `<layer>.lora_A` (R, I) and `<layer>.lora_B` (O, R), float32.
    """
    lora = {}
    for layer in layers:
        out_features, in_features = weights[f"{layer}.weight"].shape
        if rank > min(out_features, in_features):
            raise ValueError(f"LoRA rank {rank} exceeds the size of {layer}, {out_features} x {in_features}.")
        bound = 1 / math.sqrt(in_features)
        lora[f"{layer}.lora_A"] = (torch.rand(rank, in_features, generator=generator) * 2 - 1) * bound
        lora[f"{layer}.lora_B"] = torch.zeros(out_features, rank)
    return lora
