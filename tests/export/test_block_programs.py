"""The programs against diffusers' own modules: forward to 1e-5, every LoRA gradient to 1e-4 relative."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.traceback import NodeSource

from export import ops
from export.block_programs import BlockKind, block_methods
from export.lower import MAX_PROGRAM_BYTES, lower, runtime_operators
from host.frozen_base import token_grid
from runtime.bundle import Bundle
from runtime.errors import ContractError, ExportError
from runtime.trainer import Trainer


class LoraLinear(nn.Module):
    """PEFT's formula around diffusers' own layer, the reference for gradients."""

    def __init__(self, layer: nn.Module, down: torch.Tensor, up: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down, self.up = nn.Parameter(down.clone()), nn.Parameter(up.clone())

    def forward(self, x):
        return self.layer(x) + (x @ self.down.T) @ self.up.T * self.scale


@pytest.fixture(scope="module")
def trainer(bundle_dir):
    """A trainer whose LoRA is not at its start: with B = 0 the gradient of A would be zero."""
    trainer = Trainer(Bundle(bundle_dir))
    trainer.lora.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return trainer


def eager_with_lora(exporter, trainer):
    """diffusers' blocks with the trainer's LoRA in place."""
    transformer = exporter.model.load("transformer")
    scale = exporter.config.export.lora_alpha / exporter.config.export.lora_rank
    named = trainer.lora.named()
    wrapped = {}
    for name in sorted({key.rsplit(".lora_", 1)[0] for key in named}):
        parent, _, child = name.rpartition(".")
        layer = LoraLinear(
            transformer.get_submodule(name), named[f"{name}.lora_A.weight"], named[f"{name}.lora_B.weight"], scale
        )
        setattr(transformer.get_submodule(parent), child, layer)
        wrapped[name] = layer
    return transformer, wrapped


def batched(sample):
    conditioning = {name: value[None] for name, value in sample.tensors.items()}
    return conditioning.pop("hidden"), conditioning


def test_forward_equals_diffusers_to_1e5(exporter, trainer):
    transformer, _ = eager_with_lora(exporter, trainer)
    sample = trainer.read(0)
    expected, conditioning = batched(sample)
    grid = token_grid(exporter.model, (8, 8))
    with torch.no_grad():
        for index in exporter.middle:
            expected = exporter.model.adapter.run_block(transformer, index, expected, conditioning, grid)
    _, (hidden,) = trainer.forward([sample])
    torch.testing.assert_close(hidden, expected[0], rtol=1e-5, atol=1e-5)


def test_loss_and_every_lora_gradient_equal_autograds(exporter, trainer):
    transformer, wrapped = eager_with_lora(exporter, trainer)
    adapter, sample = exporter.model.adapter, trainer.read(1)
    hidden, conditioning = batched(sample)
    for index in exporter.middle:
        hidden = adapter.run_block(transformer, index, hidden, conditioning, token_grid(exporter.model, (8, 8)))
    hidden = transformer.norm_out(
        hidden + conditioning["tail_residual"], conditioning["embedded_timestep"], transformer.scale_shift_table
    )
    expected = (transformer.proj_out(hidden) - conditioning["target"]).pow(2).mean()
    expected.backward()
    trainer.lora.gradient.zero_()
    (loss,) = trainer.accumulate([sample], 1.0)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    positions = {exporter.blocks[index].module: position for position, index in enumerate(exporter.middle)}
    assert len(wrapped) == 8 * len(positions)
    for name, layer in wrapped.items():
        module = next(module for module in positions if name.startswith(f"{module}."))
        for side, parameter in (("lora_A", layer.down), ("lora_B", layer.up)):
            start, end, shape = trainer.lora._spans[positions[module], f"{name.removeprefix(module + '.')}.{side}"]
            got = trainer.lora.gradient[start:end].view(shape)
            assert got.abs().max() > 0, name
            error = (got - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, (name, side, float(error))


def test_the_programs_are_one_small_file_made_once_per_kind(exporter, bundle_dir):
    bundle = Bundle(bundle_dir)
    assert bundle.path(bundle.manifest.programs.file).stat().st_size < MAX_PROGRAM_BYTES
    assert set(bundle.manifest.programs.methods) == {"sana_block_forward", "sana_block_backward", "loss"}
    assert len(bundle.manifest.blocks) == len(exporter.middle) == 2
    for method in bundle.manifest.programs.methods.values():
        assert method.planned_bytes > 0
        assert all(isinstance(size, int) and size > 0 for spec in method.inputs for size in spec.shape)


def test_inputs_of_another_shape_or_dtype_are_refused_before_the_call(trainer):
    sample = trainer.read(0)
    for change, message in [
        (sample.tensors["hidden"][:-1].clone(), r"'hidden' is torch.float32 \[15, 64\] , expected float32 \[16, 64\]"),
        (sample.tensors["hidden"].double(), "torch.float64"),
        (sample.tensors["hidden"].t().contiguous().t(), "not contiguous"),
    ]:
        with pytest.raises(ContractError, match=message):
            trainer.loss(sample, change)


def example_kind(function):
    weights = {"layer.weight": torch.randn(8, 8)}
    lora = {"layer.lora_A": torch.randn(2, 8), "layer.lora_B": torch.randn(8, 2)}
    return BlockKind(
        name="bad_block", function=function, hidden=torch.randn(4, 8), conditioning={}, weights=weights, lora=lora
    )


def test_a_missing_operator_is_named_with_its_line(tmp_path):
    def block(hidden, conditioning, weights, linear):
        return torch.special.bessel_j0(linear("layer", hidden).detach()) + linear("layer", hidden)

    assert not any("bessel" in name for name in runtime_operators())
    with pytest.raises(ExportError, match=r"bessel_j0.*test_block_programs\.py:\d+ in block"):
        lower(block_methods(example_kind(block), 1.0), tmp_path / "p.pte", "portable")
    assert list(tmp_path.iterdir()) == []


def test_lowering_leaves_the_process_as_it_was(tmp_path):
    record = NodeSource(None, "a pass")

    def block(hidden, conditioning, weights, linear):
        return linear("layer", hidden)

    lower(block_methods(example_kind(block), 1.0), tmp_path / "p.pte", "xnnpack")
    assert gc.get_freeze_count() == 0
    assert copy.deepcopy(record) is not record
    assert copy.deepcopy(record) == record


def test_a_captured_weight_is_refused():
    captured = torch.randn(8, 8)

    def block(hidden, conditioning, weights, linear):
        return linear("layer", hidden) @ captured

    with pytest.raises((ExportError, AssertionError), match=r"constants|fake|Fake"):
        block_methods(example_kind(block), 1.0)


def test_a_wide_dtype_is_refused_with_its_line():
    def block(hidden, conditioning, weights, linear):
        return linear("layer", hidden).double().float()

    with pytest.raises(ExportError, match=r"float64.*in block: return"):
        block_methods(example_kind(block), 1.0)


def test_depthwise_gradient_equals_torchs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator, requires_grad=True)
    kernel, bias = torch.randn(5, 1, 3, 3, generator=generator), torch.randn(5, generator=generator)
    upstream = torch.randn(12, 5, generator=generator)
    (ours,) = torch.autograd.grad(ops.depthwise_conv(x, kernel, bias, (3, 4)), [x], upstream)
    image = x.T.reshape(1, 5, 3, 4)
    y = torch.nn.functional.conv2d(image, kernel, bias, padding=1, groups=5)
    (theirs,) = torch.autograd.grad(y.reshape(5, 12).T, [x], upstream)
    torch.testing.assert_close(ours, theirs)


def test_masked_prompt_tokens_change_nothing():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=generator) for n in (4, 6, 6))
    bias = torch.tensor([0.0, 0, 0, 0, -10000, -10000])
    q, k, v = (ops.split_heads(x, 2) for x in (q, k, v))
    kept = ops.softmax_attention(q, k[:, :4], v[:, :4])
    np.testing.assert_allclose(ops.softmax_attention(q, k, v, bias), kept, rtol=1e-6, atol=1e-6)
