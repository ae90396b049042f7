import math

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from export.weights import initial_lora, lora_layers, save_weights

WEIGHTS = {
    "attn1.to_q.weight": torch.zeros(8, 6),
    "attn2.to_q.weight": torch.zeros(8, 6),
    "attn1.to_out.0.weight": torch.zeros(6, 8),
    "attn1.to_out.0.bias": torch.zeros(6),
    "ff.conv_depth.weight": torch.zeros(8, 1, 3, 3),
}


def test_targets_match_as_in_peft():
    assert lora_layers(WEIGHTS, ["to_q"]) == ["attn1.to_q", "attn2.to_q"]
    assert lora_layers(WEIGHTS, ["attn2.to_q", "to_out.0"]) == ["attn2.to_q", "attn1.to_out.0"]
    assert lora_layers(WEIGHTS, ["to_q", "to_q"]) == ["attn1.to_q", "attn2.to_q"]


@pytest.mark.parametrize("target", ["q", "to_k", "conv_depth", ""])
def test_a_target_that_matches_no_linear_layer_is_refused_with_what_there_is(target):
    with pytest.raises(ValueError, match=r"matches no layer.*attn1\.to_q, attn2\.to_q"):
        lora_layers(WEIGHTS, [target])


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
        initial_lora(WEIGHTS, ["attn1.to_q"], 7, torch.Generator())


def test_weights_are_written_as_float32_and_the_same_bytes_each_time(tmp_path):
    weights = {"b": torch.randn(3, 4).half(), "a": torch.randn(4, 3).T}
    for name in ("one", "two"):
        save_weights(tmp_path / name, weights)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = load_file(tmp_path / "one")
    assert all(value.dtype == torch.float32 for value in loaded.values())
    assert torch.equal(loaded["a"], weights["a"])
    assert torch.equal(loaded["b"], weights["b"].float())
