"""The planner: counts against the paper's facts and measurements, and against what the runtime plans."""

import dataclasses

import pytest
import torch
from torch import nn

from host import plan as planner
from host.model_costs import RUNTIME_BYTES, ModelCosts
from host.models import BlockRef
from host.plan import PUBLISHED, WEIGHTS, cut_of_share, fitting, parameter_counts, plan, table
from runtime.bundle import Bundle
from runtime.manifest import TrainingSpec
from runtime.memory import MIB
from runtime.trainer import planned_private_bytes
from tests.tiny_models import FLUX as TINY_FLUX
from tests.tiny_models import SANA as TINY_SANA

GIB = 1024**3
SANA_06B = {
    "_class_name": "SanaTransformer2DModel",
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 36,
    "attention_head_dim": 32,
    "num_layers": 28,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
    "sample_size": 16,
    "patch_size": 1,
}
SANA_16B = SANA_06B | {
    "num_attention_heads": 70,
    "num_layers": 20,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "sample_size": 32,
}
# All else is the class's default.
FLUX_DEV = {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}
SMALL_SANA = TINY_SANA | {"_class_name": "SanaTransformer2DModel"}
SMALL = {"patch_side": 64, "image_side": 128, "prompt_tokens": 8, "latent_factor": 8}

# GiB; DiT-BlockSkip (arXiv 2603.20755), shared/paper.md section 1.
PAPER_FLUX = {
    "GPU: LoRA": 35.99,
    "GPU: LoRA, patches": 30.48,
    "GPU: skipping 50 %": 12.85,
    "GPU: skipping 30 %, patches": 20.78,
    "GPU: skipping 50 %, patches": 10.42,
}
DC_AE_GIB = 312_250_275 * 4 / GIB
"""SANA's autoencoder in float32, counted from diffusers' `AutoencoderDC` in the published configuration."""


@pytest.fixture(scope="module")
def flux_rows():
    return {(r.method, r.weights): r for r in plan(FLUX_DEV, cut=(19, 10), **PUBLISHED["FluxTransformer2DModel"])}


@pytest.fixture(scope="module")
def sana_rows():
    rows = plan(SANA_16B, cut=(5, 5), weights=("fp32",), **PUBLISHED["SanaTransformer2DModel"])
    return {row.method: row for row in rows}


# To the last digit the paper's notes give.
@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (FLUX_DEV, {"flux_double": 339.8, "flux_single": 141.6, "rest": 64}),
        (SANA_06B, {"sana_block": 20.65, "rest": 13.7}),
        (SANA_16B, {"sana_block": 77.9, "rest": 46}),
    ],
)
def test_parameters_are_those_of_the_published_models(config, millions):
    counts = parameter_counts(config)
    assert counts.keys() == millions.keys()
    for name, expected in millions.items():
        assert counts[name] / 1e6 == pytest.approx(expected, rel=5e-3), name


@pytest.mark.parametrize("method", PAPER_FLUX)
def test_memory_of_the_papers_flux_rows_comes_out_within_two_percent(flux_rows, method):
    assert flux_rows[method, "bf16"].private_bytes / GIB == pytest.approx(PAPER_FLUX[method], rel=0.02)


def test_the_parameter_share_of_flux_lora_is_the_papers(flux_rows):
    row = flux_rows["GPU: LoRA", "bf16"]
    share = 2 * row.shipped_parameters + 4 * row.trained_parameters
    assert share / GIB == pytest.approx(22.84, abs=0.01)


def test_activations_alone_agree_with_the_differences_between_the_papers_rows(flux_rows):
    # 768 image tokens less, over 57 and over 28 blocks; weights and LoRA cancel. The paper gives two digits.
    private = {method: row.private_bytes / GIB for (method, _), row in flux_rows.items() if method in PAPER_FLUX}
    assert private["GPU: LoRA"] - private["GPU: LoRA, patches"] == pytest.approx(35.99 - 30.48, abs=0.1)
    assert private["GPU: skipping 50 %"] - private["GPU: skipping 50 %, patches"] == pytest.approx(2.43, abs=0.1)


def test_sana_lora_is_the_papers_with_the_autoencoder_that_stays_in_memory(sana_rows):
    assert sana_rows["GPU: LoRA"].private_bytes / GIB + DC_AE_GIB == pytest.approx(8.35, rel=0.05)


def test_sana_skipping_differs_from_the_paper_as_documented(sana_rows):
    assert sana_rows["GPU: skipping 50 %, patches"].private_bytes / GIB == pytest.approx(2.27, abs=0.01)
    assert sana_rows["GPU: skipping 30 %, patches"].private_bytes / GIB == pytest.approx(3.14, abs=0.01)
    for number in ("2.27", "3.14", "unexplained"):
        assert number in planner.__doc__


def test_saved_activations_are_those_of_a_block_that_can_be_counted_by_hand():
    class Adapter:
        def run_block(self, transformer, index, hidden, conditioning, grid):
            return transformer.block(hidden)

    model = object.__new__(ModelCosts)
    block = nn.Sequential(nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model.half = nn.ModuleDict({"block": block}).to("meta", torch.bfloat16)
    model.half.block = block
    model.adapter, model.rank, model.grid = Adapter(), 2, (4, 4)
    model.layers, model.blocks = [("1",)], [BlockRef("kind", "block")]
    model.half_hidden = torch.empty(1, 16, 32, dtype=torch.bfloat16, device="meta")
    model.half_conditioning = {}
    saved, flops = model._autograd(0)
    layer_norm = 16 * 32 * 4 + 2 * 16 * 4  # float32 input, mean and deviation
    lora = 16 * 32 * 2 + 16 * 2 * 2 + (2 * 32 + 64 * 2) * 2  # bf16 input, its projection, bf16 copies of A and B
    gelu = 16 * 64 * 2
    assert saved == layer_norm + lora + gelu
    products = 16 * (2 * 32 * 64 + 32 * 2 + 2 * 64)
    assert flops == 2 * (2 * products + 16 * (32 * 2 + 2 * 64))  # LoRA's two matrices need a gradient as well


def test_private_memory_is_what_the_runtime_plans_for_the_bundle(exporter, bundle_dir):
    bundle, settings = Bundle(bundle_dir), exporter.config.export
    example = next(
        i.shape for i in bundle.manifest.programs.methods["sana_block_forward"].inputs if i.name == "context"
    )
    (row,) = plan(
        exporter.model.config,
        cut=exporter.cut,
        patch_side=exporter.patch_side,
        image_side=exporter.image_side,
        prompt_tokens=example[0],
        latent_factor=exporter.factor,
        lora_rank=settings.lora_rank,
        lora_targets=settings.lora_targets,
        samples=settings.samples,
        sample_dtype=settings.sample_dtype,
        weights=("fp32",),
    )[:1]
    # The bundle's programs are portable: their arenas are laid out apart, where XNNPACK has one workspace.
    assert row.private_bytes - RUNTIME_BYTES == pytest.approx(planned_private_bytes(bundle), rel=0.5)
    weight_files = sum(bundle.path(block.file).stat().st_size for block in bundle.manifest.blocks)
    weight_files += bundle.path(bundle.manifest.loss_file).stat().st_size
    assert row.weight_bytes == pytest.approx(weight_files, rel=0.05)  # headers
    assert row.sample_bytes == pytest.approx(exporter.plan().sample_bytes, rel=0.05)  # prompts
    assert row.shipped_parameters * 4 == row.weight_bytes


def test_a_step_streams_the_weights_twice_for_each_sample(flux_rows):
    by_dtype = {weights: row for (method, weights), row in flux_rows.items() if method.startswith("phone")}
    assert tuple(by_dtype) == WEIGHTS
    difference = by_dtype["fp32"].streamed_bytes_per_step - by_dtype["bf16"].streamed_bytes_per_step
    # The output layer travels once and is not streamed.
    expected = 2 * TrainingSpec().accumulation * (by_dtype["fp32"].weight_bytes - by_dtype["bf16"].weight_bytes)
    assert difference == pytest.approx(expected, rel=1e-3)


def test_flux_in_half_its_blocks_fits_a_phone_where_the_papers_method_does_not(flux_rows):
    assert flux_rows["phone: streamed", "int8"].private_bytes < 1.5 * GIB
    assert flux_rows["GPU: skipping 50 %, patches", "bf16"].private_bytes > 10 * GIB


def test_operations_grow_with_the_blocks_trained():
    small, large = (
        plan(SMALL_SANA, cut=cut, weights=("fp32",), **SMALL)[0].tflops_per_step for cut in ((2, 2), (1, 0))
    )
    assert large == pytest.approx(4 * small, rel=1e-6)


def test_fitting_puts_the_best_setting_first_and_keeps_the_budget():
    settings = {
        "image_side": 128,
        "latent_factor": 8,
        "prompt_tokens": 8,
        "patch_sides": (32, 64),
        "shares": (0.5, 0.0),
    }
    every = fitting(SMALL_SANA, GIB, **settings)
    order = [(sum(s.cut), -s.patch_side, WEIGHTS.index(s.weights)) for s in every]
    assert order == sorted(order)
    assert len(every) == 2 * 2 * len(WEIGHTS)
    assert (every[0].cut, every[0].patch_side, every[0].weights) == ((0, 0), 64, "fp32")
    budget = sorted(s.row.private_bytes for s in every)[len(every) // 2]
    some = fitting(SMALL_SANA, budget, **settings)
    assert some == [s for s in every if s.row.private_bytes <= budget]
    assert 0 < len(some) < len(every)


def test_fitting_gives_nothing_where_nothing_fits():
    assert fitting(SMALL_SANA, 1000, image_side=64, latent_factor=8, prompt_tokens=8, patch_sides=(32,)) == []


def test_fitting_tries_quarters_of_the_picture_that_make_whole_tokens():
    settings = {"latent_factor": 8, "prompt_tokens": 8, "shares": (0.5,), "weights": ("fp32",)}
    # Tokens of 16 pixels: 24 and 72 are none.
    assert [s.patch_side for s in fitting(SMALL_SANA, GIB, image_side=96, **settings)] == [96, 48]


def test_fitting_takes_narrower_weights_where_flash_is_small():
    settings = {"image_side": 128, "latent_factor": 8, "prompt_tokens": 8, "shares": (0.0,), "patch_sides": (64,)}
    exact, *_ = fitting(SMALL_SANA, GIB, **settings)
    needed = exact.row.weight_bytes + exact.row.sample_bytes
    narrow, *_ = fitting(SMALL_SANA, GIB, flash_bytes=needed - 1, **settings)
    assert (exact.weights, narrow.weights) == ("fp32", "fp16")


def test_samples_stored_in_fewer_bits_take_less_flash_and_as_much_memory():
    config = TINY_FLUX | {"_class_name": "FluxTransformer2DModel"}
    int8, fp32 = (
        plan(config, cut=(2, 2), weights=("fp32",), sample_dtype=dtype, **SMALL)[0] for dtype in ("int8", "fp32")
    )
    assert int8.sample_bytes < fp32.sample_bytes
    assert int8.streamed_bytes_per_step < fp32.streamed_bytes_per_step
    assert int8.private_bytes == fp32.private_bytes


def test_the_papers_picks_are_used_for_flux_and_halves_elsewhere():
    assert [cut_of_share(57, share) for share in (0.3, 0.4, 0.5)] == [(7, 10), (13, 10), (19, 10)]
    assert [cut_of_share(20, share) for share in (0.0, 0.25, 0.5)] == [(0, 0), (3, 2), (5, 5)]
    with pytest.raises(ValueError, match=r"share: got 1\.0"):
        cut_of_share(20, 1.0)


def test_table_is_aligned_and_names_every_row(flux_rows):
    lines = table(list(flux_rows.values())).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 1 + len(flux_rows)
    assert "36.18 GiB" in next(line for line in lines if line.startswith("GPU: LoRA "))


def test_rows_are_values(sana_rows):
    row = sana_rows["phone: streamed"]
    assert row.private_bytes < 512 * MIB
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.private_bytes = 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": SMALL_SANA | {"_class_name": "UNet2DConditionModel"}}, "no adapter for 'UNet2DConditionModel'"),
        ({"config": TINY_SANA}, "no adapter for None"),
        ({"cut": (3, 2)}, "cut 3,2 leaves nothing to train: the model has 5 blocks"),
        ({"cut": (-1, 2)}, "cut -1,2"),
        ({"patch_side": 40}, "got 40, expected a multiple of 16"),
        ({"patch_side": 0}, "got 0, expected a multiple of 16"),
        ({"patch_side": 256}, "patch_side 256 exceeds image_side 128"),
        ({"weights": ("fp8",)}, "weights: got 'fp8', expected one of fp32"),
        ({"sample_dtype": "fp64"}, "sample_dtype: got 'fp64'"),
        ({"lora_targets": ("to_nothing",)}, "match no layer; the layers are attn1.to_k"),
        ({"lora_rank": 1000}, "LoRA rank 1000 exceeds"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(changes, message):
    arguments = {"config": SMALL_SANA, "cut": (1, 1), **SMALL} | changes
    with pytest.raises(ValueError, match=message):
        plan(arguments.pop("config"), **arguments)
