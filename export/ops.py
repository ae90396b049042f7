"""Building blocks of block functions, written so that their gradients lower to operators every ExecuTorch runtime has.

Tensors carry no batch axis. Shape suffixes: T image tokens, L prompt tokens, S both, D model width, O/I linear out/in features,
H heads, K head width, C channels, Y and X rows and columns of the token grid, R LoRA rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _FrozenMatmul(torch.autograd.Function):
    """x_TI @ weight_OI.T for a weight that is stored once, as (O, I), and gets no gradient.

    Only activations are transposed: a transposed copy of a weight costs more than the product itself.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return torch.mm(weight_OI, x_TI.t()).t()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, None]:
        (weight_OI,) = ctx.saved_tensors
        return torch.mm(grad_TO, weight_OI), None


class _FrozenDepthwise(torch.autograd.Function):
    """3x3 depthwise convolution with a frozen kernel. Its gradient is the convolution with the kernel turned by 180
    degrees; ExecuTorch's `convolution_backward` takes ten times as long."""

    @staticmethod
    def forward(ctx: Any, x_1CYX: Tensor, kernel_C133: Tensor, bias_C: Tensor) -> Tensor:
        ctx.save_for_backward(kernel_C133)
        return F.conv2d(x_1CYX, kernel_C133, bias_C, padding=1, groups=kernel_C133.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_1CYX: Tensor) -> tuple[Tensor, None, None]:
        (kernel_C133,) = ctx.saved_tensors
        turned_C133 = kernel_C133.flip(2, 3)
        return F.conv2d(grad_1CYX, turned_C133, None, padding=1, groups=kernel_C133.shape[0]), None, None


class _Rotate(torch.autograd.Function):
    """Turns each pair of channels by its angle; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_HSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SK, sin_SK)
        return x_HSK * cos_SK + _quarter_turn(x_HSK) * sin_SK

    @staticmethod
    def backward(ctx: Any, grad_HSK: Tensor) -> tuple[Tensor, None, None]:
        cos_SK, sin_SK = ctx.saved_tensors
        return grad_HSK * cos_SK - _quarter_turn(grad_HSK) * sin_SK, None, None


def _quarter_turn(x_HSK: Tensor) -> Tensor:
    pairs = x_HSK.unflatten(2, (-1, 2))
    return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(2)


class FrozenLinears:
    """The linear layers of one block: frozen weights by diffusers' names, with LoRA on those that have it."""

    def __init__(self, weights: Mapping[str, Tensor], lora: Mapping[str, Tensor], lora_scale: float) -> None:
        """Holds weights `<name>.weight` (O, I), optional `<name>.bias` (O,), and LoRA `<name>.lora_A` (R, I), `<name>.lora_B`
        (O, R); `lora_scale` is alpha / rank."""
        self._weights = weights
        self._lora = lora
        self._lora_scale = lora_scale

    def __call__(self, name: str, x_TI: Tensor) -> Tensor:
        """Applies layer `name` to (T, I), giving (T, O)."""
        y_TO = _FrozenMatmul.apply(x_TI, self._weights[f"{name}.weight"])
        if f"{name}.bias" in self._weights:
            y_TO = y_TO + self._weights[f"{name}.bias"]
        if f"{name}.lora_A" in self._lora:
            x_TR = torch.mm(x_TI, self._lora[f"{name}.lora_A"].t())
            y_TO = y_TO + torch.mm(x_TR, self._lora[f"{name}.lora_B"].t()) * self._lora_scale
        return y_TO


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x); `F.silu`'s own gradient uses `empty_permuted`, which the runtime lacks."""
    return x * torch.sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016), written out: the runtime has no kernel of its gradient."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def layer_norm(x_TD: Tensor, epsilon: float, weight_D: Tensor | None = None, bias_D: Tensor | None = None) -> Tensor:
    """Layer normalisation over the last axis, with or without learned scale and shift."""
    return F.layer_norm(x_TD, (x_TD.shape[-1],), weight_D, bias_D, epsilon)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467)."""
    return x_TD * torch.rsqrt((x_TD * x_TD).mean(-1, keepdim=True) + epsilon) * weight_D


def rotate(x_HSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on neighbouring pairs of channels, as diffusers' `apply_rotary_emb`; the two
    channels of a pair share their angle."""
    return _Rotate.apply(x_HSK, cos_SK, sin_SK)


def modulate(x_TD: Tensor, shift_1D: Tensor, scale_1D: Tensor) -> Tensor:
    """Adaptive normalisation: x * (1 + scale) + shift."""
    return x_TD * (1 + scale_1D) + shift_1D


def split_heads(x_TD: Tensor, num_heads: int) -> Tensor:
    """(T, D) to (H, T, K)."""
    return x_TD.view(x_TD.shape[0], num_heads, -1).transpose(0, 1)


def merge_heads(x_HTK: Tensor) -> Tensor:
    """(H, T, K) to (T, D)."""
    return x_HTK.transpose(0, 1).reshape(x_HTK.shape[1], -1)


def linear_attention(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, num_heads: int) -> Tensor:
    """ReLU linear attention of SANA (arXiv 2410.10629), as diffusers' SanaLinearAttnProcessor2_0, with numerator and
    denominator apart: padding the values with a row of ones has no gradient in the runtime."""
    q_HTK, k_HTK = torch.relu(split_heads(q_TD, num_heads)), torch.relu(split_heads(k_TD, num_heads))
    v_HTK = split_heads(v_TD, num_heads)
    numerator_HTK = torch.bmm(q_HTK, torch.bmm(k_HTK.transpose(1, 2), v_HTK))
    denominator_HT1 = (q_HTK * k_HTK.sum(1, keepdim=True)).sum(-1, keepdim=True) + 1e-15
    return merge_heads(numerator_HTK / denominator_HT1)


def softmax_attention(q_HTK: Tensor, k_HLK: Tensor, v_HLK: Tensor, bias_L: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, (H, T, K) to (T, D), with a bias per key (0 keeps, -10000 masks); written out: the
    flash kernel's gradient is not in the runtime."""
    scores_HTL = torch.bmm(q_HTK, k_HLK.transpose(1, 2)) * (q_HTK.shape[-1] ** -0.5)
    if bias_L is not None:
        scores_HTL = scores_HTL + bias_L
    return merge_heads(torch.bmm(torch.softmax(scores_HTL, -1), v_HLK))


def depthwise_conv(x_TC: Tensor, kernel_C133: Tensor, bias_C: Tensor, grid: tuple[int, int]) -> Tensor:
    """3x3 depthwise convolution over the token grid (Y, X), T = Y * X."""
    x_1CYX = x_TC.t().reshape(1, x_TC.shape[1], *grid)
    y_1CYX = _FrozenDepthwise.apply(x_1CYX, kernel_C133, bias_C)
    return y_1CYX.reshape(x_TC.shape[1], x_TC.shape[0]).t()
