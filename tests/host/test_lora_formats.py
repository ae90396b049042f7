"""Adapters from PEFT's format to kohya's and back, and what diffusers makes of the converted files."""

import json
import re

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, SanaPipeline, SanaTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file

from export.weights import lora_candidates
from host.lora_formats import LAYERS, convert_file, from_kohya, to_kohya
from runtime.tensor_file import write_tensor_file
from tests.tiny_models import FLUX, SANA

RANK, ALPHA = 3, 7.0
CONFIG = "lora_adapter_metadata"
# As published but for the number of blocks: diffusers splits kohya's `linear1` at the published widths only.
FLUX_DEV_WIDTH = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
OUTSIDE_BLOCKS = r"x_embedder|context_embedder|time_text_embed\..*|norm_out\.linear|proj_out"


def meta(model, config):
    with torch.device("meta"):
        return model(**config)


def adapter(transformer, pattern=r".*", rank=RANK, alpha=ALPHA):
    """A random PEFT adapter on the modules that match, as runtime/adapter.py writes it."""
    generator = torch.Generator().manual_seed(5)
    modules = [name for name in lora_candidates(transformer) if re.fullmatch(pattern, name)]
    tensors = {}
    for name in modules:
        outputs, inputs, *kernel = transformer.get_submodule(name).weight.shape
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, inputs, *kernel, generator=generator)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(outputs, rank, *kernel, generator=generator)
    config = {"transformer.r": rank, "transformer.lora_alpha": alpha, "transformer.target_modules": sorted(modules)}
    metadata = {
        "format": "pt",
        CONFIG: json.dumps(config, sort_keys=True),
        "pocketdit.steps": "400",
        "pocketdit.cut": "1,1",
    }
    return tensors, metadata


def deltas(tensors, scale):
    """What an adapter in PEFT's names adds to each weight."""
    ups = {name: value for name, value in tensors.items() if ".lora_B." in name}
    return {
        name.split(".lora_B.")[0].removeprefix("transformer."): scale
        * up.flatten(1)
        @ tensors[name.replace("lora_B", "lora_A")].flatten(1)
        for name, up in ups.items()
    }


def loaded_deltas(pipeline, transformer, path):
    """What diffusers adds to each weight after it loaded the file."""
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    known = {name: None for name in parts if pipeline is FluxPipeline or not name.endswith("_2")}
    pipeline(**known, transformer=transformer).load_lora_weights(path.parent, weight_name=path.name, adapter_name="x")
    layers = {name: module for name, module in transformer.named_modules() if hasattr(module, "get_delta_weight")}
    return {name: layer.get_delta_weight("x").detach().flatten(1) for name, layer in layers.items()}


def assert_same(actual, expected):
    """Values compared bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * max(d.abs().max() for d in expected.values()))


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)
    return FluxTransformer2DModel(**FLUX)


@pytest.fixture(scope="module")
def sana():
    torch.manual_seed(0)
    return SanaTransformer2DModel(**SANA)


@pytest.fixture
def flux_file(flux, tmp_path):
    path = tmp_path / "adapter.safetensors"
    write_tensor_file(
        path, *adapter(flux, r"transformer_blocks\..*|single_transformer_blocks\.\d\.(proj_out|norm\.linear)")
    )
    return path


@pytest.mark.parametrize("guidance", [True, False], ids=["dev", "schnell"])
def test_the_table_covers_every_linear_layer_of_flux_and_nothing_else(guidance):
    modules = lora_candidates(meta(FluxTransformer2DModel, FLUX | {"guidance_embeds": guidance}))
    blocks = {"transformer_blocks": FLUX["num_layers"], "single_transformer_blocks": FLUX["num_single_layers"]}
    patterns = [module for layer in LAYERS["flux"].values() for module in layer.modules]
    named = [p.format(i) for p in patterns for i in range(blocks.get(p.split(".")[0], 1))]
    assert sorted(modules) == sorted(name for name in named if guidance or "guidance" not in name)
    assert all(len(layer.rows) == len(layer.modules) for layer in LAYERS["flux"].values())


def test_sana_names_are_paths_with_underscores_and_cover_every_linear_layer_and_pointwise_convolution(sana):
    tensors, metadata = adapter(sana)
    converted, _ = to_kohya(tensors, metadata, "sana")
    weights = [n for n, w in sana.named_parameters() if n.endswith(".weight") and w.ndim > 1]
    others = {"patch_embed.proj.weight", *(n for n in weights if "conv_depth" in n)}
    expected = {"lora_unet_" + n.removesuffix(".weight").replace(".", "_") for n in weights if n not in others}
    assert {name.split(".")[0] for name in converted} == expected
    assert converted["lora_unet_transformer_blocks_0_ff_conv_inverted.lora_down.weight"].shape == (RANK, 64, 1, 1)
    assert converted["lora_unet_transformer_blocks_0_ff_conv_inverted.lora_up.weight"].shape == (320, RANK, 1, 1)


@pytest.mark.parametrize("alpha", [ALPHA, 0.1, 5.3])
@pytest.mark.parametrize(
    "pattern",
    [r".*", r".*attn\.(to_v|add_k_proj|to_out\.0)", r"single_.*\.(proj_mlp|attn\.to_k)", r".*proj_mlp"],
    ids=["all layers", "one of q, k, v", "k and MLP", "MLP alone"],
)
@pytest.mark.parametrize("family", ["flux", "sana"])
def test_there_and_back_gives_the_same_bits(family, pattern, alpha, request):
    transformer = request.getfixturevalue(family)
    tensors, metadata = adapter(transformer, pattern if family == "flux" else r".*", alpha=alpha)
    converted, told = to_kohya(tensors, metadata, family)
    assert told == {"format": "pt", "pocketdit.steps": "400", "pocketdit.cut": "1,1"}
    assert all(value.shape == () for name, value in converted.items() if name.endswith(".alpha"))
    back, told = from_kohya(converted, lora_candidates(transformer), family)
    assert_same(back, tensors)
    assert told == {key: metadata[key] for key in ("format", CONFIG)}


def test_an_untrained_adapter_whose_lora_b_is_zero_keeps_its_modules(flux):
    tensors, metadata = adapter(flux, r".*attn\.to_[qv]")
    tensors = {name: value * ("lora_A" in name) for name, value in tensors.items()}
    assert_same(from_kohya(to_kohya(tensors, metadata, "flux")[0], lora_candidates(flux), "flux")[0], tensors)


def test_fused_layers_are_block_diagonal_with_alpha_over_rank_unchanged(flux):
    tensors, metadata = adapter(flux, r"single_.*\.0\.(attn\.to_[qk]|proj_mlp)")
    converted, _ = to_kohya(tensors, metadata, "flux")
    down, up, alpha = (
        converted[f"lora_unet_single_blocks_0_linear1.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha")
    )
    delta = alpha / down.shape[0] * up @ down
    parts = deltas(tensors, ALPHA / RANK)
    q, k, mlp = (parts[f"single_transformer_blocks.0.{name}"] for name in ("attn.to_q", "attn.to_k", "proj_mlp"))
    assert down.shape == (4 * RANK, 64)
    assert alpha == 4 * ALPHA
    torch.testing.assert_close(delta, torch.cat([q, k, torch.zeros(64, 64), mlp]), rtol=1e-6, atol=1e-5)


def test_diffusers_adds_the_same_to_a_tiny_flux_from_either_format(flux, flux_file):
    kohya = flux_file.with_name("kohya.safetensors")
    convert_file(flux_file, kohya, "kohya", family="flux", module_names=lora_candidates(flux))
    expected = loaded_deltas(FluxPipeline, FluxTransformer2DModel(**FLUX), flux_file)
    assert_close(loaded_deltas(FluxPipeline, FluxTransformer2DModel(**FLUX), kohya), expected)
    assert_close(expected, deltas(load_file(flux_file), ALPHA / RANK))


def test_diffusers_adds_the_same_to_a_flux_of_the_published_width(tmp_path):
    transformer = meta(FluxTransformer2DModel, FLUX_DEV_WIDTH)
    tensors, metadata = adapter(
        transformer, r"single_.*attn\.to_[qkv]|single_.*proj_mlp|transformer_.*attn\.to_q", rank=2
    )
    write_tensor_file(tmp_path / "kohya.safetensors", *to_kohya(tensors, metadata, "flux"))
    # The base's weights are never touched, so they take no memory.
    loaded = loaded_deltas(FluxPipeline, transformer.to_empty(device="cpu"), tmp_path / "kohya.safetensors")
    assert_close({name: value for name, value in loaded.items() if value.any()}, deltas(tensors, ALPHA / 2))


def test_diffusers_reads_layers_outside_the_blocks_under_names_it_then_drops(flux):
    tensors, metadata = adapter(flux, OUTSIDE_BLOCKS, alpha=float(RANK))  # it also ignores the last layer's alpha
    read = FluxPipeline.lora_state_dict(to_kohya(tensors, metadata, "flux")[0])
    assert not any(name.startswith("transformer.") for name in read)  # when this fails, correct the comment in LAYERS
    assert_close(deltas(read, 1), deltas(tensors, 1))


def test_a_dense_fused_layer_of_another_trainer_reads_as_diffusers_reads_it(flux):
    generator = torch.Generator().manual_seed(6)
    name = "lora_unet_double_blocks_1_txt_attn_qkv"
    tensors = {
        f"{name}.lora_down.weight": torch.randn(6, 64, generator=generator),
        f"{name}.lora_up.weight": torch.randn(192, 6, generator=generator),
        f"{name}.alpha": torch.tensor(2.0),
    }
    back, metadata = from_kohya(tensors, lora_candidates(flux), "flux")
    assert json.loads(metadata[CONFIG])["transformer.lora_alpha"] == 2
    assert_close(deltas(back, 2 / 6), deltas(FluxPipeline.lora_state_dict(dict(tensors)), 1))
    again, _ = from_kohya(to_kohya(back, metadata, "flux")[0], lora_candidates(flux), "flux")
    assert_same(again, back)


@pytest.mark.parametrize("pattern", [r"transformer_blocks\.0\.attn\.to_out\.0", r"proj_out"])
def test_ranks_and_alphas_that_differ_reach_diffusers_through_patterns(flux, tmp_path, pattern):
    most, metadata = adapter(flux, r"transformer_blocks\..*(to_q|net\.2)")
    few, few_metadata = adapter(flux, pattern, rank=2, alpha=1.0)
    kohya = to_kohya(most, metadata, "flux")[0] | to_kohya(few, few_metadata, "flux")[0]
    tensors, told = from_kohya(kohya, lora_candidates(flux), "flux")
    write_tensor_file(tmp_path / "mixed.safetensors", tensors, told)
    loaded = loaded_deltas(FluxPipeline, FluxTransformer2DModel(**FLUX), tmp_path / "mixed.safetensors")
    expected = deltas(most, ALPHA / RANK) | deltas(few, 1 / 2)
    assert_close({name: loaded[name] for name in expected}, expected)
    assert_same(to_kohya(tensors, told, "flux")[0], kohya)


def test_sana_reaches_diffusers_unchanged_through_either_prefix(sana, tmp_path):
    tensors, metadata = adapter(sana)
    kohya, _ = to_kohya(tensors, metadata, "sana")
    kohya = {name.replace("lora_unet_", "lora_transformer_"): value for name, value in kohya.items()}
    write_tensor_file(tmp_path / "back.safetensors", *from_kohya(kohya, lora_candidates(sana), "sana"))
    loaded = loaded_deltas(SanaPipeline, SanaTransformer2DModel(**SANA), tmp_path / "back.safetensors")
    assert_close(loaded, deltas(tensors, ALPHA / RANK))


def test_diffusers_paths_are_read_for_flux_too(flux):
    tensors, metadata = adapter(flux)
    by_path, _ = to_kohya(tensors, metadata, "")
    by_path = {name.replace("lora_unet_", "lora_transformer_"): value for name, value in by_path.items()}
    assert_same(from_kohya(by_path, lora_candidates(flux), "flux")[0], tensors)


@pytest.mark.parametrize("family", ["flux", "sana"])
def test_a_file_there_and_back_is_the_same_file(family, request, tmp_path):
    transformer = request.getfixturevalue(family)
    source, kohya, back = (tmp_path / f"{name}.safetensors" for name in ("adapter", "kohya", "back"))
    write_tensor_file(source, *adapter(transformer))
    before = source.read_bytes()
    convert_file(source, kohya, "kohya", family=family, module_names=lora_candidates(transformer))
    with safe_open(kohya, "pt") as file:
        assert file.metadata() == {"format": "pt", "pocketdit.steps": "400", "pocketdit.cut": "1,1"}
    convert_file(kohya, back, "peft", family=family, module_names=lora_candidates(transformer))
    assert source.read_bytes() == before == back.read_bytes()


def test_the_source_is_never_the_target(flux, flux_file):
    link = flux_file.with_name("link.safetensors")
    link.symlink_to(flux_file)
    before = flux_file.read_bytes()
    for target in (flux_file, link):
        with pytest.raises(ValueError, match="Give another path"):
            convert_file(flux_file, target, "kohya", family="flux", module_names=lora_candidates(flux))
    assert flux_file.read_bytes() == before


def test_what_cannot_be_read_or_is_of_another_model_is_refused_and_nothing_written(flux, sana, flux_file, tmp_path):
    target = tmp_path / "target.safetensors"
    (tmp_path / "text.safetensors").write_text("not an adapter")
    for source, family, modules, message in [
        (tmp_path / "missing.safetensors", "flux", flux, r"missing.*cannot be read"),
        (tmp_path / "text.safetensors", "flux", flux, r"text.*cannot be read.*Give an adapter"),
        (tmp_path, "flux", flux, r"cannot be read"),
        (flux_file, "sana", sana, r"adapter\.safetensors: \d+ of \d+ modules match none of the model's"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert_file(source, target, "kohya", family=family, module_names=lora_candidates(modules))
    with pytest.raises(ValueError, match=r"expected kohya keys alone .*, got peft keys"):
        convert_file(flux_file, target, "peft", family="flux", module_names=lora_candidates(flux))
    assert not target.exists()


def changed(values, **changes):
    return {name: value for name, value in (values | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x.weight": torch.zeros(1)}, r"got peft keys, e\.g\. \['x\.weight'\]"),
        ({"lora_unet_img_in.lora_up.weight": torch.zeros(1)}, r"got kohya and peft keys"),
        ({"transformer.proj_out.lora_A.weight": None}, r"proj_out has no \.lora_A\.weight"),
        (
            {"transformer.proj_out.lora_B.weight": torch.zeros(64, 4)},
            r"proj_out: got \(3, 64\) and \(64, 4\), expected",
        ),
        (
            {"unet.a.lora_A.weight": torch.zeros(1, 2), "unet.a.lora_B.weight": torch.zeros(2, 1)},
            r"only the transformer",
        ),
        (
            {"transformer.a.lora_A.weight": torch.zeros(3, 2), "transformer.a.lora_B.weight": torch.zeros(2, 3)},
            "a is no layer",
        ),
    ],
    ids=["not LoRA", "both formats", "up alone", "ranks differ", "UNet", "unknown module"],
)
def test_bad_peft_adapters_are_refused(flux, changes, message):
    tensors, metadata = adapter(flux, r"proj_out")
    with pytest.raises(ValueError, match=message):
        to_kohya(changed(tensors, **changes), metadata, "flux")


@pytest.mark.parametrize(
    "config", ["{", "[]", "{}", '{"transformer.lora_alpha": null}', '{"transformer.lora_alpha": 0}']
)
def test_metadata_without_a_usable_alpha_is_refused(flux, config):
    tensors, metadata = adapter(flux, r"proj_out")
    with pytest.raises(ValueError, match=r"alpha.*Save the adapter"):
        to_kohya(tensors, metadata | {CONFIG: config}, "flux")


def test_parts_of_a_fused_layer_with_different_ranks_are_refused(flux):
    tensors, metadata = adapter(flux, r".*\.0\.attn\.to_q")
    other, _ = adapter(flux, r".*\.0\.attn\.to_k", rank=2)
    with pytest.raises(ValueError, match=r"img_attn_qkv differ: .*Keep the PEFT format"):
        to_kohya(tensors | other, metadata, "flux")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_unet_img_in.lora_down.weight": None}, r"img_in has no \.lora_down\.weight"),
        ({"lora_unet_img_in.lora_up.weight": None}, r"img_in has no \.lora_up\.weight"),
        ({"transformer.a.lora_A.weight": torch.zeros(1)}, r"got kohya and peft keys"),
        ({"lora_unet_img_in.dora_scale": torch.zeros(1)}, r"expected kohya keys alone"),
        ({"lora_unet_img_in.alpha": torch.zeros(2)}, r"alpha has shape \(2,\), expected one number"),
        ({"lora_unet_img_in.alpha": torch.tensor(0.0)}, r"has alpha 0\.0, expected a positive number"),
        (
            {"lora_te1_a.lora_down.weight": torch.zeros(1, 2), "lora_te1_a.lora_up.weight": torch.zeros(2, 1)},
            r"1 of 2 modules match none of the model's, e\.g\. \['lora_te1_a'\].*without text encoders",
        ),
        (
            {
                "lora_transformer_x_embedder.lora_down.weight": torch.ones(1, 64),
                "lora_transformer_x_embedder.lora_up.weight": torch.ones(64, 1),
            },
            r"lora_transformer_x_embedder is a second adapter on x_embedder",
        ),
        (
            {
                "lora_unet_single_blocks_0_linear1.lora_down.weight": torch.ones(1, 64),
                "lora_unet_single_blocks_0_linear1.lora_up.weight": torch.ones(64, 1),
            },
            r"linear1 has 64 rows, expected a multiple of 7",
        ),
    ],
    ids=["up alone", "down alone", "both formats", "DoRA", "alphas", "alpha 0", "text encoder", "two prefixes", "rows"],
)
def test_bad_kohya_adapters_are_refused(flux, changes, message):
    tensors, _ = to_kohya(*adapter(flux, r"x_embedder"), "flux")
    with pytest.raises(ValueError, match=message):
        from_kohya(changed(tensors, **changes), lora_candidates(flux), "flux")


def test_a_file_without_tensors_is_refused(flux):
    for convert in (lambda: to_kohya({}, {}, "flux"), lambda: from_kohya({}, lora_candidates(flux), "flux")):
        with pytest.raises(ValueError, match="got no LoRA keys"):
            convert()


def test_names_that_become_one_are_refused():
    pair = {"lora_A.weight": torch.ones(1, 2), "lora_B.weight": torch.ones(2, 1)}
    tensors = {f"transformer.{module}.{end}": value for module in ("a.b_c", "a_b.c") for end, value in pair.items()}
    with pytest.raises(ValueError, match=r"a_b_c would mean both a\.b_c and a_b\.c"):
        to_kohya(tensors, {}, "sana")


def test_without_alpha_it_equals_the_rank_and_a_warning_says_so(flux, caplog):
    tensors, metadata = adapter(flux, r"x_embedder", alpha=float(RANK))
    kohya, _ = to_kohya(tensors, {}, "flux")
    assert kohya.pop("lora_unet_img_in.alpha") == RANK
    back, told = from_kohya(kohya, lora_candidates(flux), "flux")
    assert_same(back, tensors)
    assert told[CONFIG] == metadata[CONFIG]
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert "No .alpha in 1 modules" in caplog.text
