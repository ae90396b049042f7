"""How the frozen linear weights are stored: float32, float16, bfloat16, int8 or int4. Where a weight loses its bits.

int8 has a float32 scale per row. int4 has besides an int8 factor, of either sign, per row and group of 32 columns; row r is
the high half of byte row r, row r + O/2 its low half plus 8. Everything that is no linear weight stays float32.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.manifest import WeightFormat

FLOATS: dict[WeightFormat, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GROUP = 32
"""Most columns that share an int4 factor."""
CLIPPINGS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's number of largest magnitude tried as -8, the end of the int4 range; the smallest squared error wins."""
PIECE_NUMBERS, LARGEST_PIECE, PIECE_STATES = 1 << 20, 1 << 22, 4
"""Most numbers of a weight that a program holds widened or packed at a time: as many as four hidden states, the size of a
feed-forward layer's activations, within 4 and 16 MiB in float32. Every piece costs nodes, so time to export."""
SCALE, GROUPS = "_scale", "_groups"
"""Follow the weight's name in the names of its scale (O,) and of its groups' factors (O, G)."""


def is_linear(name: str, value: Tensor) -> bool:
    """Whether a tensor of a block is the weight of a linear layer; 1x1 convolutions count, see `block_weights`."""
    return name.endswith(".weight") and value.ndim == 2


def stored(weights: Mapping[str, Tensor], weight_format: WeightFormat) -> dict[str, Tensor]:
    """A block's weights as they are stored; the meta device is enough for shapes.

    Raises:
        ValueError: A number is too large for float16.
    """
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        value = value.detach().float()
        if not is_linear(name, value) or weight_format == "fp32":
            out[name] = value
        elif weight_format in FLOATS:
            out[name] = value.to(FLOATS[weight_format])
            if not value.is_meta and not torch.isfinite(out[name]).all():
                raise ValueError(f"{name} has numbers beyond float16's 65504. Use --weights bf16 or int8.")
        elif weight_format == "int8" or value.shape[0] % 2:
            out[name], out[name + SCALE] = _int8(value)
        else:
            out[name], out[name + SCALE], out[name + GROUPS] = _int4(value)
    return out


def restored(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The float32 numbers (O, I) a stored linear weight stands for."""
    value, scale, groups = tensors[name], tensors.get(name + SCALE), tensors.get(name + GROUPS)
    if scale is None:
        return value.float()
    if groups is not None:
        high = torch.div(value, 16, rounding_mode="floor")
        codes = torch.cat([high, value - 16 * high - 8]).float()
        value = (codes.unflatten(1, (groups.shape[1], -1)) * groups.float()[..., None]).flatten(1)
    return value.float() * scale[:, None]


def row_pieces(rows: int, columns: int, state_numbers: int) -> list[tuple[int, int]]:
    """First row and end of each piece of a weight, equal but for the last; a row at least.

    Args:
        rows: Of the weight as it is stored.
        columns: Of the weight.
        state_numbers: Numbers of the hidden state the block takes.
    """
    most = max(PIECE_NUMBERS, min(LARGEST_PIECE, PIECE_STATES * state_numbers))
    count = -(-rows // max(1, most // columns))
    size = -(-rows // count)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _int8(value: Tensor) -> tuple[Tensor, Tensor]:
    scale = value.abs().amax(1).clamp(min=1e-30) / 127
    return (value / scale[:, None]).round().to(torch.int8), scale


def _int4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = value.abs().amax(1).clamp(min=1e-30) * (CLIPPINGS[0] / 8 / 127)
    groups = (value / scale[:, None]).unflatten(1, (-1, math.gcd(value.shape[1], GROUP)))
    low_end, high_end = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    # A factor has the sign that gives the far end the sixteenth code: a tenth less squared error than -7 to 7.
    sign = torch.where(high_end > -low_end, -1.0, 1.0)
    largest = torch.maximum(high_end, -low_end)
    best = torch.full_like(largest, math.inf)
    factor = torch.zeros_like(largest)
    for share in CLIPPINGS:
        tried = (largest * (share / 8)).round().clamp(1, 127) * sign
        error = ((groups / tried).round().clamp(-8, 7) * tried - groups).square().sum(2, keepdim=True)
        factor, best = torch.where(error < best, tried, factor), torch.minimum(error, best)
    codes = (groups / factor).round().clamp(-8, 7).flatten(1)
    high, low = codes.chunk(2)
    return (high * 16 + low + 8).to(torch.int8), scale, factor[..., 0].to(torch.int8)
