"""Stored weights: their bytes, their errors, and that programs compute with exactly the numbers they stand for."""

import contextlib
from dataclasses import replace

import pytest
import torch

from export import quantize
from export.block_programs import BlockKind, block_methods
from export.lower import delegated, lower
from export.ops import softmax_attention, split, split_heads
from runtime.programs import arguments, portable_lib

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")


def weight(rows=96, columns=192, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


@pytest.mark.parametrize(
    ("weight_format", "bytes_per_number", "largest_error"),
    # Half a unit in the last place is 2^-11 or 2^-8 of a number; an int8 step is 1/127 of the row's largest, an int4 step 1/8
    # of the group's: of normal numbers some 3.4 and 2.1 standard deviations.
    [("fp32", 4, 0), ("fp16", 2, 3e-4), ("bf16", 2, 2.3e-3), ("int8", 1.021, 9e-3), ("int4", 0.535, 0.083)],
)
def test_bytes_and_error_of_each_format(weight_format, bytes_per_number, largest_error):
    value = weight(256, 1152)
    stored = quantize.stored({"layer.weight": value}, weight_format)
    assert sum(tensor.nbytes for tensor in stored.values()) <= bytes_per_number * value.numel()
    error = (quantize.restored("layer.weight", stored) - value).norm() / value.norm()
    assert largest_error / 2 <= error <= largest_error


def test_only_linear_weights_change():
    tensors = {
        "norm.weight": torch.randn(8),
        "layer.bias": torch.randn(8),
        "conv.weight": torch.randn(8, 1, 3, 3),
        "table": weight(),
    }
    for weight_format in FORMATS:
        stored = quantize.stored(tensors, weight_format)
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[name], value) for name, value in tensors.items())


def test_rows_of_zeros_and_odd_rows_are_kept():
    value = weight(7, 64)
    value[2] = 0
    for weight_format in ("int8", "int4"):
        restored = quantize.restored("a.weight", quantize.stored({"a.weight": value}, weight_format))
        assert not restored[2].any()
        torch.testing.assert_close(restored, value, rtol=0, atol=0.02)


def test_what_float16_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"a\.weight has numbers beyond float16's 65504"):
        quantize.stored({"a.weight": torch.full((2, 2), 1e5)}, "fp16")


@pytest.mark.parametrize("state_numbers", [64 * 1152, 256 * 3072, 768 * 3072])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (1152, 1152), (5760, 1152), (3072, 15360)])
def test_pieces_cover_all_rows_and_are_small(rows, columns, state_numbers):
    pieces = quantize.row_pieces(rows, columns, state_numbers)
    most = max(quantize.PIECE_NUMBERS, min(quantize.LARGEST_PIECE, 4 * state_numbers))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == rows
    assert all(end == start for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False))
    assert all(1 <= (end - start) * columns <= max(most, columns) for start, end in pieces)
    # None of them could be larger by a piece: each is more than half of what it may be.
    assert all((end - start) * columns > most / 2 for start, end in pieces[:-1])


def example(weight_format, seed=0):
    """A block with attention, a branch in two halves and LoRA on both layers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "wide.weight": weight(96, 64, 1),
        "wide.bias": torch.randn(96, generator=generator),
        "out.weight": weight(64, 48, 2),
    }
    lora = {
        f"{name}.{side}": torch.randn(shape, generator=generator) * 0.1
        for name, o, i in (("wide", 96, 64), ("out", 64, 48))
        for side, shape in (("lora_A", (2, i)), ("lora_B", (o, 2)))
    }

    def block(hidden, conditioning, weights, linear):
        first, second = split(linear("wide", hidden), 48, 1)
        heads = [split_heads(x, 3) for x in (first, second, first)]
        return hidden + linear("out", softmax_attention(*heads))

    kind = BlockKind(
        name="block",
        function=block,
        hidden=torch.randn(10, 64, generator=generator),
        conditioning={},
        weights=quantize.stored(weights, weight_format),
        lora=lora,
    )
    plain = {n: quantize.restored(n, kind.weights) if quantize.is_linear(n, w) else w for n, w in weights.items()}
    return kind, plain


@pytest.mark.parametrize("weight_format", FORMATS)
def test_programs_compute_with_the_numbers_the_format_stands_for(weight_format, tmp_path, monkeypatch):
    # Several pieces a layer, more than are concatenated at a time.
    monkeypatch.setattr(quantize, "PIECE_NUMBERS", 1500)
    monkeypatch.setattr(quantize, "PIECE_STATES", 0)
    kind, plain = example(weight_format)
    spec = lower(block_methods(kind, 1.5), tmp_path / "p.pte", "xnnpack")
    module = portable_lib._load_for_executorch(str(tmp_path / "p.pte"))
    upstream = torch.randn(10, 64, generator=torch.Generator().manual_seed(9))
    inputs = kind.weights | dict(kind.lora) | {"hidden": kind.hidden, "grad_output": upstream}

    def call(method):
        return module.run_method(method, arguments(method, spec.methods[method], inputs))

    lora = {name: value.clone().requires_grad_(True) for name, value in kind.lora.items()}
    hidden = kind.hidden.clone().requires_grad_(True)
    # Autograd's own gradients of torch's own operations, on the numbers the format stands for.
    wide = (
        hidden @ plain["wide.weight"].T
        + plain["wide.bias"]
        + 1.5 * (hidden @ lora["wide.lora_A"].T) @ lora["wide.lora_B"].T
    )
    first, second = (x.unflatten(1, (3, 16)).transpose(0, 1) for x in (wide[:, :48], wide[:, 48:]))
    attended = torch.nn.functional.scaled_dot_product_attention(first, second, first).transpose(0, 1).flatten(1)
    out = attended @ plain["out.weight"].T + 1.5 * (attended @ lora["out.lora_A"].T) @ lora["out.lora_B"].T
    expected = torch.autograd.grad(hidden + out, [hidden, *lora.values()], upstream)
    torch.testing.assert_close(call("block_forward")[0], (hidden + out).detach(), rtol=1e-5, atol=1e-5)
    for got, want in zip(call("block_backward"), expected, strict=True):
        assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("weight_format", ["fp32", "int8", "int4"])
def test_a_block_is_one_call_of_xnnpack(weight_format, tmp_path):
    kind, _ = example(weight_format)
    methods = block_methods(kind, 1.0)
    edge = delegated(methods, "xnnpack")
    for name in methods:
        nodes = [n for n in edge.exported_program(name).graph.nodes if n.op == "call_function"]
        targets = [str(n.target) for n in nodes if "getitem" not in str(n.target)]
        assert targets == ["executorch_call_delegate"], targets


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_passes_that_lowering_leaves_out_change_nothing(weight_format, monkeypatch, tmp_path):
    methods = block_methods(example(weight_format)[0], 1.0)
    lower(methods, tmp_path / "fewer.pte", "xnnpack")
    monkeypatch.setattr("export.lower._passes_that_apply", contextlib.nullcontext)
    lower(methods, tmp_path / "all.pte", "xnnpack")
    assert (tmp_path / "fewer.pte").read_bytes() == (tmp_path / "all.pte").read_bytes()


def test_a_scale_of_another_weight_is_refused(tmp_path):
    kind, _ = example("int8")
    broken = replace(kind, weights=dict(kind.weights) | {"out.weight_scale": torch.ones(3)})
    with pytest.raises(RuntimeError):
        block_methods(broken, 1.0)
