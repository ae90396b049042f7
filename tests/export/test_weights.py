import math

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from export.weights import choose_layers, initial_lora, lora_layers, save_weights

PATH = "transformer_blocks.4"


class Block(nn.Module):
    """The module names of a SANA block."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("attn1", "attn2"):
            attention = nn.Module()
            attention.to_q, attention.to_k = nn.Linear(6, 8), nn.Linear(6, 8)
            attention.to_out = nn.ModuleList([nn.Linear(8, 6), nn.Dropout(0.0)])
            self.add_module(name, attention)
        self.ff = nn.Module()
        self.ff.conv_inverted = nn.Conv2d(6, 8, 1)
        self.ff.conv_depth = nn.Conv2d(8, 8, 3, groups=8)


ALL_LINEAR = tuple(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_out.0"))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("to_q",), ("attn1.to_q", "attn2.to_q")),
        (("attn2.to_q", "to_out.0"), ("attn1.to_out.0", "attn2.to_q", "attn2.to_out.0")),
        (("to_q", "to_q"), ("attn1.to_q", "attn2.to_q")),
        ((f"{PATH}.attn1.to_q",), ("attn1.to_q",)),
        (("conv_inverted",), ("ff.conv_inverted",)),
        (r".*\.attn2\.to_[qk]", ("attn2.to_q", "attn2.to_k")),
        (r"transformer_blocks\.5\..*to_q", ()),
        ("all-linear", ALL_LINEAR),
        (("q",), ()),
        (("to_v",), ()),
    ],
)
def test_layers_are_those_peft_itself_wraps(targets, expected):
    assert lora_layers(Block(), PATH, targets) == expected
    model = nn.Module()
    model.transformer_blocks = nn.ModuleList([nn.Identity() for _ in range(4)] + [Block()])
    config = peft.LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else list(targets))
    if expected:
        wrapped = peft.inject_adapter_in_model(config, model)
        names = {name.removesuffix(".lora_A") for name, _ in wrapped.named_modules() if name.endswith(".lora_A")}
        assert names == {f"{PATH}.{layer}" for layer in expected}


def test_a_depthwise_convolution_cannot_have_lora():
    with pytest.raises(ValueError, match=r"'ff.conv_depth' is a 3x3 convolution with 8 groups"):
        lora_layers(Block(), PATH, ("conv_depth",))


def test_a_target_of_another_kind_of_block_leaves_the_trained_blocks_their_own():
    other = nn.Module()
    other.attn = nn.Module()
    other.attn.to_q, other.attn.to_v = nn.Linear(6, 8), nn.Linear(6, 8)
    blocks = {PATH: Block(), "single.0": other}
    targets = ("to_q", "to_v", "to_out.0")
    assert choose_layers(blocks, targets, ["single.0"]) == {"single.0": ("attn.to_q", "attn.to_v")}
    assert choose_layers(blocks, targets, [PATH])[PATH] == (
        "attn1.to_q",
        "attn1.to_out.0",
        "attn2.to_q",
        "attn2.to_out.0",
    )
    with pytest.raises(ValueError, match=r"target 'to_x' matches no layer of any block; their layers are attn\.to_q, "):
        choose_layers(blocks, ("to_q", "to_x"), ["single.0"])
    with pytest.raises(
        ValueError, match=r"match no layer of the trained blocks single\.0 to single\.0; their layers are"
    ):
        choose_layers(blocks, ("to_out.0",), ["single.0"])


def test_targets_that_are_no_regular_expression_are_refused():
    with pytest.raises(ValueError, match=r"lora_targets: got '\(', which is no regular expression \(missing \)"):
        lora_layers(Block(), PATH, "(")


def test_the_start_is_drawn_as_peft_draws_it():
    generator = torch.Generator().manual_seed(0)
    weights = {"layer.weight": torch.zeros(64, 1024)}
    ours = initial_lora(weights, ["layer"], 16, generator)
    theirs = (
        peft.get_peft_model(nn.Sequential(nn.Linear(1024, 64)), peft.LoraConfig(r=16, target_modules=["0"]))
        .base_model.model[0]
        .lora_A["default"]
        .weight
    )
    bound = 1 / math.sqrt(1024)
    for value in (ours["layer.lora_A"], theirs):
        assert bound * 0.98 < value.abs().max() <= bound
        assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not ours["layer.lora_B"].any()
    assert ours["layer.lora_A"].shape == theirs.shape


def test_a_rank_larger_than_the_layer_is_refused():
    with pytest.raises(ValueError, match=r"rank 7 exceeds the size of attn1\.to_q, 8 x 6"):
        initial_lora({"attn1.to_q.weight": torch.zeros(8, 6)}, ["attn1.to_q"], 7, torch.Generator())


def test_the_same_weights_are_the_same_bytes(tmp_path):
    weights = {"b": torch.randn(3, 4).half(), "a": torch.randn(4, 3).T, "c": torch.randint(-9, 9, (2, 2)).char()}
    for name in ("one", "two"):
        save_weights(tmp_path / name, weights)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = load_file(tmp_path / "one")
    assert {name: value.dtype for name, value in loaded.items()} == {n: w.dtype for n, w in weights.items()}
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
