"""Building blocks of block functions, written so that forward and gradient lower to operators XNNPACK takes.

A block then is one XNNPACK graph: vectorised, threaded on a phone too, its intermediate results in one workspace. Hence the
habits here: products are `bmm` of two run-time operands, means run over the last axes of a 4-D view, and what would leave
XNNPACK in autograd's own gradient (normalisation, softmax, ReLU, slices) has its gradient written out.

Tensors carry no batch axis. Shape suffixes: T image tokens, L prompt tokens, S both, D model width, O/I linear out/in features,
H heads, K head width, C channels, Y and X rows and columns of the token grid, R LoRA rank, G groups of columns, 1 an axis of
size one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CONCATENATED = 5
"""Tensors XNNPACK concatenates at a time."""
GELU_SLOPE, GELU_CUBIC = 0.7978845608028654, 0.044715


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A frozen linear weight (O, I) as a program takes it: in pieces of its rows, in the type it is stored in.

    Products need a packed, and for narrow types a widened, copy of one piece at a time. export/quantize.py makes the types.
    """

    pieces: tuple[Tensor, ...]
    """(1, o, I) each; int4: (1, o/2, I), two rows to a byte row."""
    scale: Tensor | None = None
    """(O,) of int8 and int4."""
    groups: Tensor | None = None
    """(O, G) int8 of int4."""

    def apply(self, x_1IT: Tensor) -> Tensor:
        """weight @ x, as (T, O). The weight is the left operand, which XNNPACK reads in place."""
        parts = sorted(
            ((start, torch.bmm(part_1OI, x_1IT)) for start, part_1OI in self._widened()), key=lambda item: item[0]
        )
        return self._row_scaled(_down(_concatenated([part for _, part in parts], 1).transpose(1, 2)))

    def apply_back(self, grad_TO: Tensor) -> Tensor:
        """grad @ weight, as (T, I)."""
        grad_1TO = _up(self._row_scaled(grad_TO))
        total_1TI = None
        for start, part_1OI in self._widened():
            product_1TI = torch.bmm(grad_1TO[:, :, start : start + part_1OI.shape[1]], part_1OI)
            total_1TI = product_1TI if total_1TI is None else total_1TI + product_1TI
        assert total_1TI is not None
        return _down(total_1TI)

    def _row_scaled(self, x_TO: Tensor) -> Tensor:
        return x_TO * self.scale if self.scale is not None else x_TO

    def _widened(self) -> Iterator[tuple[int, Tensor]]:
        """First row and float32 numbers of each piece, one after the other so that their memory is shared."""
        start = 0
        half = sum(piece.shape[1] for piece in self.pieces)
        groups_OG = _int8_to_float(self.groups) if self.groups is not None else None
        for piece in self.pieces:
            end = start + piece.shape[1]
            if piece.dtype != torch.int8:
                yield start, piece.float()
            elif groups_OG is None:
                yield start, _int8_to_float(piece)
            else:
                both = _int8_to_float(piece)
                high = torch.floor(both * 0.0625)
                yield start, _group_scaled(high, groups_OG[start:end])
                yield half + start, _group_scaled(both - high * 16.0 - 8.0, groups_OG[half + start : half + end])
            start = end


def _int8_to_float(x: Tensor) -> Tensor:
    """XNNPACK's conversion; `.float()` would be a kernel outside of it, sixteen times slower."""
    return torch.ops.quantized_decomposed.dequantize_per_tensor.default(x, 1.0, 0, -128, 127, torch.int8)


def _group_scaled(x_1OI: Tensor, groups_OG: Tensor) -> Tensor:
    rows, groups = groups_OG.shape
    return (x_1OI.reshape(rows, groups, -1) * groups_OG.reshape(rows, groups, 1)).reshape(x_1OI.shape)


def _concatenated(parts: list[Tensor], dim: int) -> Tensor:
    while len(parts) > 1:
        groups = [parts[i : i + MAX_CONCATENATED] for i in range(0, len(parts), MAX_CONCATENATED)]
        parts = [torch.cat(group, dim) if len(group) > 1 else group[0] for group in groups]
    return parts[0]


def _up(x: Tensor) -> Tensor:
    return x.reshape(1, *x.shape)


def _down(x: Tensor) -> Tensor:
    return x.reshape(x.shape[1:])


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return _down(torch.bmm(_up(a), _up(b)))


def _mean_last(x: Tensor) -> Tensor:
    """Mean over the last axis, which stays with size 1."""
    return x.reshape(-1, 1, 1, x.shape[-1]).mean((2, 3), keepdim=True).reshape(*x.shape[:-1], 1)


class _Linear(torch.autograd.Function):
    """x @ weight.T for a frozen weight, plus scale * (x @ A.T) @ B.T where there is LoRA."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, lora_A: Tensor | None, lora_B: Tensor | None, lora_scale: float, weight: StoredWeight
    ) -> Tensor:
        x_1IT = _up(x_TI).transpose(1, 2)
        y_TO, x_TR = weight.apply(x_1IT), None
        if lora_A is not None and lora_B is not None:
            x_TR = _down(torch.bmm(_up(lora_A), x_1IT).transpose(1, 2))
            y_TO = y_TO + _matmul(x_TR, lora_B.t()) * lora_scale
        ctx.save_for_backward(x_TI, lora_A, lora_B, x_TR)
        ctx.weight, ctx.lora_scale = weight, lora_scale
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, lora_A, lora_B, x_TR = ctx.saved_tensors
        grad_x = ctx.weight.apply_back(grad_TO) if ctx.needs_input_grad[0] else None
        if lora_A is None:
            return grad_x, None, None, None, None
        scaled_TO = grad_TO * ctx.lora_scale
        grad_TR = _matmul(scaled_TO, lora_B)
        if grad_x is not None:
            grad_x = grad_x + _matmul(grad_TR, lora_A)
        return grad_x, _matmul(grad_TR.t(), x_TI), _matmul(scaled_TO.t(), x_TR), None, None


class _Normalize(torch.autograd.Function):
    """x / sqrt(mean x² + epsilon) over the last axis, after taking off the mean if `centered`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, centered: bool) -> Tensor:
        x = x - _mean_last(x) if centered else x
        inverse = torch.rsqrt(_mean_last(x * x) + epsilon)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        ctx.centered = centered
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        y, inverse = ctx.saved_tensors
        grad_x = grad - y * _mean_last(grad * y)
        return (grad_x - _mean_last(grad) if ctx.centered else grad_x) * inverse, None, None


class _Softmax(torch.autograd.Function):
    """Over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - _mean_last(grad * y) * float(y.shape[-1]))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        y = x * gate
        ctx.save_for_backward(gate, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate, y = ctx.saved_tensors
        return grad * (gate + y * (1.0 - gate))


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        curve = torch.tanh(x * (x * x * (GELU_SLOPE * GELU_CUBIC) + GELU_SLOPE))
        ctx.save_for_backward(x, curve)
        return x * (curve * 0.5 + 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, curve = ctx.saved_tensors
        slope = x * (x * x * (1.5 * GELU_SLOPE * GELU_CUBIC) + 0.5 * GELU_SLOPE)
        return grad * (curve * 0.5 + 0.5 + (1.0 - curve * curve) * slope)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * torch.clamp(y * 1e38, 0.0, 1.0)  # XNNPACK compares nothing: 1 where y > 0


class _Split(torch.autograd.Function):
    """In two along an axis; the gradient joins, where a slice's own would fill with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
        ctx.dim = dim
        return x.narrow(dim, 0, size).clone(), x.narrow(dim, size, x.shape[dim] - size).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(grads, ctx.dim), None, None


class _FrozenDepthwise(torch.autograd.Function):
    """3x3 depthwise convolution with a frozen kernel as nine shifted products; the gradient takes the kernel turned by 180
    degrees. ExecuTorch's own convolution takes nine times as long."""

    @staticmethod
    def forward(ctx: Any, x_YXC: Tensor, kernel_9C: Tensor) -> Tensor:
        ctx.save_for_backward(kernel_9C)
        return _shifted_products(x_YXC, kernel_9C, range(9))

    @staticmethod
    def backward(ctx: Any, grad_YXC: Tensor) -> tuple[Tensor, None]:
        (kernel_9C,) = ctx.saved_tensors
        return _shifted_products(grad_YXC, kernel_9C, reversed(range(9))), None


def _shifted_products(x_YXC: Tensor, kernel_9C: Tensor, taps: Any) -> Tensor:
    rows, columns, _ = x_YXC.shape
    padded = F.pad(x_YXC, (0, 0, 1, 1, 1, 1))
    total = None
    for place, tap in enumerate(taps):
        y, x = divmod(place, 3)
        product = padded[y : y + rows, x : x + columns] * kernel_9C[tap : tap + 1]
        total = product if total is None else total + product
    assert total is not None
    return total


class _Rotate(torch.autograd.Function):
    """Turns pairs of channels, first half with second half, by their angles; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_HSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_HSK, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_HSK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_HSK, cos, -sin), None, None


def _turned(x_HSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_HSK.shape[2] // 2
    first, second = x_HSK[:, :, :half], x_HSK[:, :, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 2)


class _LinearAttention(torch.autograd.Function):
    """q (k' v) / (q k' 1), all (H, T, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_HKT = k.transpose(1, 2)
        state_HKK, sum_HK1 = torch.bmm(k_HKT, v), _mean_last(k_HKT) * float(k.shape[1])
        weight_HT1 = torch.bmm(q, sum_HK1) + 1e-15
        y = torch.bmm(q, state_HKK) / weight_HT1
        ctx.save_for_backward(q, k, v, state_HKK, sum_HK1, weight_HT1, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, state_HKK, sum_HK1, weight_HT1, y = ctx.saved_tensors
        grad = grad / weight_HT1
        grad_weight_HT1 = _mean_last(grad * y) * -float(y.shape[2])
        q_HKT = q.transpose(1, 2)
        grad_state_HKK, grad_sum_HK1 = torch.bmm(q_HKT, grad), torch.bmm(q_HKT, grad_weight_HT1)
        grad_q = torch.bmm(grad, state_HKK.transpose(1, 2)) + grad_weight_HT1 * sum_HK1.transpose(1, 2)
        grad_k = torch.bmm(v, grad_state_HKK.transpose(1, 2)) + grad_sum_HK1.transpose(1, 2)
        return grad_q, grad_k, torch.bmm(k, grad_state_HKK)


class FrozenLinears:
    """The linear layers of one block: frozen weights by diffusers' names, with LoRA on those that have it."""

    def __init__(
        self, weights: Mapping[str, Tensor | StoredWeight], lora: Mapping[str, Tensor], lora_scale: float
    ) -> None:
        """Holds weights `<name>.weight`, (O, I) or stored, optional `<name>.bias` (O,), and LoRA `<name>.lora_A` (R, I),
        `<name>.lora_B` (O, R); `lora_scale` is alpha / rank."""
        self._weights = weights
        self._lora = lora
        self._lora_scale = lora_scale

    def __call__(self, name: str, x_TI: Tensor) -> Tensor:
        """Applies layer `name` to (T, I), giving (T, O)."""
        weight, bias_O = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        if isinstance(weight, Tensor):
            weight = StoredWeight((_up(weight),))
        lora = (self._lora.get(f"{name}.lora_A"), self._lora.get(f"{name}.lora_B"))
        y_TO: Tensor = _Linear.apply(x_TI, *lora, self._lora_scale, weight)
        return y_TO + bias_O if isinstance(bias_O, Tensor) else y_TO


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _Silu.apply(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return _GeluTanh.apply(x)


def split(x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The first `size` entries along an axis, and the rest."""
    return _Split.apply(x, size, dim)


def layer_norm(x_TD: Tensor, epsilon: float, weight_D: Tensor | None = None, bias_D: Tensor | None = None) -> Tensor:
    """Layer normalisation over the last axis, with or without learned scale and shift."""
    y_TD: Tensor = _Normalize.apply(x_TD, epsilon, True)
    y_TD = y_TD if weight_D is None else y_TD * weight_D
    return y_TD if bias_D is None else y_TD + bias_D


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467)."""
    return _Normalize.apply(x_TD, epsilon, False) * weight_D


def rotate(x_SHK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on neighbouring pairs of channels, as diffusers' `apply_rotary_emb`; the two
    channels of a pair share their angle.

    Returns:
        (H, S, K) with all first channels of the pairs before all second ones. Scores do not see the order of channels, as
        long as queries and keys share it.
    """

    def halved(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2)

    x_HSK = halved(x_SHK).permute(1, 0, 2, 3).reshape(x_SHK.shape[1], x_SHK.shape[0], -1)
    cos, sin = (halved(x)[:, :1].reshape(x.shape[0], -1) for x in (cos_SK, sin_SK))
    return _Rotate.apply(x_HSK, cos, sin)


def modulate(x_TD: Tensor, shift_1D: Tensor, scale_1D: Tensor) -> Tensor:
    """Adaptive normalisation: x * (1 + scale) + shift."""
    return x_TD * (scale_1D + 1.0) + shift_1D


def split_heads(x_TD: Tensor, num_heads: int) -> Tensor:
    """(T, D) to (H, T, K)."""
    return x_TD.reshape(x_TD.shape[0], num_heads, -1).transpose(0, 1)


def merge_heads(x_HTK: Tensor) -> Tensor:
    """(H, T, K) to (T, D)."""
    return x_HTK.transpose(0, 1).reshape(x_HTK.shape[1], -1)


def linear_attention(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, num_heads: int) -> Tensor:
    """ReLU linear attention of SANA (arXiv 2410.10629), as diffusers' SanaLinearAttnProcessor2_0."""
    q_HTK, k_HTK = (_Relu.apply(split_heads(x, num_heads)) for x in (q_TD, k_TD))
    return merge_heads(_LinearAttention.apply(q_HTK, k_HTK, split_heads(v_TD, num_heads)))


def softmax_attention(q_HTK: Tensor, k_HLK: Tensor, v_HLK: Tensor, bias_L: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, (H, T, K) to (T, D), with a bias per key (0 keeps, -10000 masks)."""
    scores_HTL = torch.bmm(q_HTK, k_HLK.transpose(1, 2)) * (q_HTK.shape[-1] ** -0.5)
    if bias_L is not None:
        scores_HTL = scores_HTL + bias_L
    return merge_heads(torch.bmm(_Softmax.apply(scores_HTL), v_HLK))


def depthwise_conv(x_TC: Tensor, kernel_C133: Tensor, bias_C: Tensor, grid: tuple[int, int]) -> Tensor:
    """3x3 depthwise convolution over the token grid (Y, X), T = Y * X."""
    channels = x_TC.shape[1]
    kernel_9C = kernel_C133.reshape(channels, 9).t()
    y_YXC = _FrozenDepthwise.apply(x_TC.reshape(*grid, channels), kernel_9C)
    return y_YXC.reshape(x_TC.shape) + bias_C
