"""What the families with joint attention (FLUX, SD3) share: modulations, the end of a stream, the output layers.

Modulations, the rows of shifts, scales and gates of adaptive layer normalisation, depend on timestep, guidance and pooled
prompt alone. So they are computed on the workstation and stored with the sample; the linear layers that make them need not
travel unless LoRA trains them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export import ops
from export.block_programs import PredictFunction
from export.ops import FrozenLinears
from host.models.base import PromptStates, TransformerConfig

EMBEDDING = "time_text"
ROWS = "modulation"
OUTPUT_ROWS = "output_modulation"
EPSILON = 1e-6


def blank_prompts(config: TransformerConfig, mask: Tensor) -> PromptStates:
    """Zeros in the shape of what the encoders give, for a mask (P, L)."""
    states = torch.zeros(*mask.shape, config.joint_attention_dim)
    return PromptStates(states, mask, torch.zeros(len(mask), config.pooled_projection_dim))


def inputs(block: nn.Module, norms: Sequence[str], embedded_BD: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """What a block's program takes: the rows (B, M, D), or the embedding (B, D) where one of `norms` has LoRA."""
    if any(name in layers for name in norms):
        return {EMBEDDING: embedded_BD}
    made = [block.get_submodule(name)(F.silu(embedded_BD)) for name in norms]
    return {ROWS: torch.cat(made, 1).unflatten(1, (-1, embedded_BD.shape[1]))}


def weights(block: nn.Module, norms: Sequence[str], layers: Sequence[str]) -> dict[str, Tensor]:
    """The block's weights, without those of `norms` unless one of them has LoRA."""
    shipped = any(name in layers for name in norms)
    return {n: w for n, w in block.state_dict().items() if shipped or n.rsplit(".", 1)[0] not in norms}


def rows(conditioning: Mapping[str, Tensor], linear: FrozenLinears, norms: Sequence[str]) -> list[Tensor]:
    """Rows (1, D) inside a block function, in the order of `norms`."""
    rows_MD = conditioning.get(ROWS)
    if rows_MD is None:
        embedded_1D = ops.silu(conditioning[EMBEDDING]).unsqueeze(0)
        rows_MD = torch.cat([linear(name, embedded_1D) for name in norms], 1).view(-1, embedded_1D.shape[1])
    return [rows_MD[i : i + 1] for i in range(rows_MD.shape[0])]


def output_rows(norm_out: nn.Module, embedded_BD: Tensor) -> Tensor:
    """Shift and scale (B, 2, D) of diffusers' `AdaLayerNormContinuous`, which makes scale before shift."""
    scale_BD, shift_BD = norm_out.linear(F.silu(embedded_BD)).chunk(2, 1)  # type: ignore[operator]
    return torch.stack([shift_BD, scale_BD], 1)


def run_block(block: Any, hidden_BSD: Tensor, grid: tuple[int, int], *arguments: Any, **settings: Any) -> Tensor:
    """diffusers' own block on the joined state; a block that drops the prompt leaves it as it is."""
    num_image = grid[0] * grid[1]
    text, image = hidden_BSD.split([hidden_BSD.shape[1] - num_image, num_image], 1)
    new_text, image = block(image, text, *arguments, **settings)
    return torch.cat([text if new_text is None else new_text, image], 1)


def end_of_stream(
    x_TD: Tensor, attended_TD: Tensor, out: str, feed_forward: str, rows: Sequence[Tensor], linear: FrozenLinears
) -> Tensor:
    """Output projection and feed-forward layers of one stream of a block; rows are gate, shift, scale, gate."""
    gate_attention, shift, scale, gate = rows
    x_TD = x_TD + gate_attention * linear(out, attended_TD)
    wide = linear(f"{feed_forward}.net.0.proj", ops.modulate(ops.layer_norm(x_TD, EPSILON), shift, scale))
    return x_TD + gate * linear(f"{feed_forward}.net.2", ops.gelu_tanh(wide))


def run_output(transformer: Any, hidden_BTD: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
    """diffusers' own output layers."""
    return transformer.proj_out(transformer.norm_out(hidden_BTD, conditioning[EMBEDDING]))


def predict_weights(transformer: Any) -> dict[str, Tensor]:
    """Weights of the output layer."""
    return {"proj_out.weight": transformer.proj_out.weight.data, "proj_out.bias": transformer.proj_out.bias.data}


def predict_function(transformer: Any) -> PredictFunction:
    """The output layers after `output_rows`."""

    def predict(hidden_TD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        rows_2D = conditioning[OUTPUT_ROWS]
        x_TD = ops.modulate(ops.layer_norm(hidden_TD, EPSILON), rows_2D[0:1], rows_2D[1:2])
        return FrozenLinears(weights, {}, 1.0)("proj_out", x_TD)

    return predict
