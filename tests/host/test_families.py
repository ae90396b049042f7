"""Every family against PEFT and diffusers: tiny random models saved with all their components, loaded offline."""

import contextlib
import inspect
import json
import shutil
from pathlib import Path

import diffusers
import numpy as np
import peft
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from export import lower
from host.config import GenerateConfig
from host.exporter import Exporter
from host.generate import generate
from host.models.base import bare_pipeline
from runtime.bundle import Bundle
from runtime.manifest import TrainingSpec
from runtime.metrics import read_metrics
from runtime.sample_store import SampleStore
from runtime.trainer import ADAPTER, Trainer, train
from tests.tiny_models import (
    SANA_15,
    SANA_SPRINT,
    export_config,
    rebuild_inputs,
    save_flux,
    save_sana_with_gemma,
    save_sd3,
    whole_prediction,
)

GUIDANCE = 2.5
SETTINGS = TrainingSpec(
    steps=5, accumulation=2, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, checkpoint_every=5
)
SAVE = {
    "sana-1.5": lambda folder: save_sana_with_gemma(folder, SANA_15),
    "sana-sprint": lambda folder: save_sana_with_gemma(folder, SANA_SPRINT),
    "flux-dev": save_flux,
    "flux-schnell": lambda folder: save_flux(folder, guidance_embeds=False),
    "sd3.5": save_sd3,
}
# Attention everywhere, feed-forward layers, and in one block of each kind of FLUX the layers that make modulations.
TARGETS = {
    "sana": ("to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"),
    "flux": r".*attn\.(to_q|to_k|to_v|to_out\.0|add_k_proj|to_add_out)|.*(ff|ff_context)\.net\.(0\.proj|2)|.*proj_mlp"
    r"|single_transformer_blocks\.\d+\.proj_out|transformer_blocks\.1\.norm1\.linear"
    r"|single_transformer_blocks\.2\.norm\.linear",
    "sd3.5": r".*attn\.(to_q|to_k|to_v|to_out\.0|add_v_proj)|.*ff\.net\.2|transformer_blocks\.1\.norm1_context\.linear",
}


@pytest.fixture(
    scope="module",
    params=[
        "flux-dev",
        pytest.param("sana-1.5", marks=pytest.mark.long),
        pytest.param("sana-sprint", marks=pytest.mark.long),
        pytest.param("flux-schnell", marks=pytest.mark.long),
        pytest.param("sd3.5", marks=pytest.mark.long),
    ],
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def exported(family, photos_dir, tmp_path_factory) -> Exporter:
    """The whole model trained, cut (0, 0), LoRA wherever the family can have it."""
    folder = tmp_path_factory.mktemp(family)
    config = export_config(
        SAVE[family](folder / "model"),
        cut=(0, 0),
        image_side=128,
        patch_side=64,
        guidance=GUIDANCE,
        lora_targets=TARGETS[family.split("-")[0]],
    )
    exporter = Exporter(config, photos_dir, folder / "bundle")
    exporter.run(lambda name, cached, seconds: None)
    return exporter


@pytest.mark.long
def test_passes_that_lowering_leaves_out_change_nothing(exported, monkeypatch, tmp_path):
    monkeypatch.setattr(lower, "_passes_that_apply", contextlib.nullcontext)
    exported._make_programs(tmp_path)
    assert (tmp_path / lower.FILE_NAME).read_bytes() == (exported.bundle_dir / lower.FILE_NAME).read_bytes()


@pytest.fixture(scope="module")
def run_dir(exported) -> Path:
    run_dir = exported.bundle_dir.with_name("run")
    train(exported.bundle_dir, run_dir, SETTINGS)
    return run_dir


def test_five_steps_equal_peft_lora_on_the_whole_model(exported, run_dir):
    settings = exported.config.export
    transformer = exported.model.load("transformer")
    targets = settings.lora_targets
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    transformer.add_adapter(config)
    parameters = {n.replace(".default", ""): p for n, p in transformer.named_parameters() if "lora_" in n}
    start = load_file(exported.bundle_dir / "lora_init.safetensors")
    assert start.keys() == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(start[name].reshape(parameter.shape))
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1)
    bundle = Bundle(exported.bundle_dir)
    store = SampleStore([bundle.path(shard) for shard in bundle.manifest.samples.shards])
    for row in read_metrics(run_dir):
        losses = []
        for index in row["samples"]:
            identity = store.identity(index)
            noisy, target, prompts = rebuild_inputs(exported, identity)
            loss = (whole_prediction(transformer, noisy, identity.sigma, prompts, GUIDANCE) - target).pow(2).mean()
            (loss / len(row["samples"])).backward()
            losses.append(float(loss.detach()))
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    ours = load_file(run_dir / ADAPTER)
    assert ours.keys() == {f"transformer.{name}" for name in parameters}
    for name, parameter in parameters.items():
        got = ours[f"transformer.{name}"]
        assert got.shape == parameter.shape, name
        moved = (parameter.detach() - start[name].reshape(parameter.shape)).norm()
        assert moved > 0, name
        # AdamW divides a gradient by its own size: where it is near zero, float32 rounding decides.
        assert (got - parameter.detach()).norm() < 2e-3 * moved, name


def test_every_blocks_output_and_every_lora_gradient_equal_diffusers(exported):
    bundle = Bundle(exported.bundle_dir)
    trainer = Trainer(bundle, threads=1)
    # Away from its start: with B = 0 the gradient of A would be zero.
    trainer.lora.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    settings, transformer = exported.config.export, exported.model.load("transformer")
    targets = settings.lora_targets if isinstance(settings.lora_targets, str) else list(settings.lora_targets)
    transformer.add_adapter(
        peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=targets)
    )
    parameters = {n.replace(".default", ""): p for n, p in transformer.named_parameters() if "lora_" in n}
    for name, value in trainer.lora.named().items():
        parameters[name].data.copy_(value.reshape(parameters[name].shape))
    sample = trainer.read(4)
    noisy, target, prompts = rebuild_inputs(exported, sample.identity)
    loss = (whole_prediction(transformer, noisy, sample.identity.sigma, prompts, GUIDANCE) - target).pow(2).mean()
    loss.backward()

    states, (last,) = trainer.forward([sample])
    adapter = exported.model.adapter
    with torch.no_grad():
        time = torch.tensor([sample.identity.timestep], dtype=torch.float32)
        hidden, conditioning = adapter.embed(transformer, noisy, time, prompts, GUIDANCE)
        for index, state in enumerate([*(state for (state,) in states[1:]), last]):
            hidden = adapter.run_block(transformer, index, hidden, conditioning, (4, 4))
            torch.testing.assert_close(state, hidden[0], rtol=1e-5, atol=1e-5)
    trainer.lora.gradient.zero_()
    assert trainer.accumulate([sample], 1.0) == [pytest.approx(float(loss.detach()), rel=1e-5)]
    for position, block in enumerate(bundle.manifest.blocks):
        for name in trainer.lora.block_inputs(position):
            start, end, _ = trainer.lora._spans[position, name]
            expected = parameters[f"{block.module}.{name}.weight"].grad.flatten()
            if not expected.any():
                # The last SD3 block drops the prompt, so what only that would use learns nothing.
                assert not trainer.lora.gradient[start:end].any()
                continue
            error = (trainer.lora.gradient[start:end] - expected).norm() / expected.norm()
            assert error < 1e-4, (block.module, name, float(error))


KINDS = {
    "sana": {"sana_block"},
    "flux": {"flux_double", "flux_double_2", "flux_single", "flux_single_2"},
    "sd3": {"sd3_joint", "sd3_joint_2", "sd3_last"},
}


def test_blocks_of_one_kind_share_a_program_and_the_file_stays_small(exported):
    bundle = Bundle(exported.bundle_dir)
    assert {block.kind for block in bundle.manifest.blocks} == KINDS[exported.model.adapter.family]
    assert len(bundle.manifest.blocks) == len(exported.blocks)
    assert bundle.path("programs.pte").stat().st_size < lower.MAX_PROGRAM_BYTES


def test_the_adapter_loads_in_the_familys_pipeline_and_changes_its_picture(exported, run_dir):
    transformer = exported.model.load("transformer")
    pipeline = bare_pipeline(exported.model.adapter.pipeline, transformer=transformer)
    pipeline.load_lora_weights(run_dir, weight_name=ADAPTER)
    loaded = {n.replace(".default_0", "") for n, _ in transformer.named_parameters() if "lora_" in n}
    assert {f"transformer.{name}" for name in loaded} == load_file(run_dir / ADAPTER).keys()
    settings = transformer.peft_config["default_0"]
    assert (settings.r, settings.lora_alpha) == (2, 3.0)
    result = generate(run_dir, GenerateConfig(seeds=(0,), steps=2, guidance=2.0))
    pictures = [np.asarray(Image.open(run_dir / "pictures" / result["items"][0][k])) for k in ("base", "adapter")]
    assert pictures[0].shape == (128, 128, 3)
    assert not np.array_equal(*pictures)


def test_one_residual_reaches_the_image_tokens_only(exported, photos_dir, tmp_path):
    config = export_config(exported.model.dir, cut=(1, 1), image_side=128, patch_side=64, guidance=GUIDANCE)
    exporter = Exporter(config, photos_dir, tmp_path / "bundle")
    out = exporter._example
    extra = {"sana": 0, "flux": 64, "sd3": 64 + 77}[exported.model.adapter.family]
    assert out.tail_residual.shape[1] == out.target.shape[1] == 16
    assert out.hidden.shape[1] == 16 + extra


def test_a_prompt_longer_than_the_encoder_takes_is_refused_before_long_work(exported, photos_dir, tmp_path):
    config = export_config(exported.model.dir, prompt="x" * 400, cut=(0, 1), image_side=128, patch_side=64)
    with pytest.raises(ValueError, match=r"has 40\d tokens, the model takes (300|64)\. Shorten"):
        Exporter(config, photos_dir, tmp_path / "bundle").plan()
    assert list(tmp_path.iterdir()) == []


def test_trimmed_prompts_give_the_prediction_of_untrimmed_ones(exported):
    if exported.model.adapter.family != "sana":
        # Nothing is masked there, so nothing may be trimmed.
        short, long = (exported.model.encode_prompts([text]).states.shape[1] for text in ("x", "a longer prompt"))
        assert short == long
        return
    prompts = exported.model.encode_prompts(["a dog", "a much longer prompt"])
    assert prompts.states.shape[1] < 300
    folder = exported.model
    pipeline = diffusers.SanaPipeline(folder.load("tokenizer"), folder.load("text_encoder"), None, None, None)
    instruction = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    states, mask, _, _ = pipeline.encode_prompt(
        ["a dog"], do_classifier_free_guidance=False, device="cpu", complex_human_instruction=instruction
    )
    assert states.shape[1] == 300
    transformer = folder.load("transformer")
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    extra = {"guidance": torch.tensor([0.2])} if transformer.config.guidance_embeds else {}
    with torch.no_grad():
        full, trimmed = (
            transformer(
                latents,
                encoder_hidden_states=s,
                encoder_attention_mask=m,
                timestep=torch.tensor([0.5]),
                **extra,
            ).sample
            for s, m in ((states, mask), (prompts.states[:1], prompts.mask[:1]))
        )
    torch.testing.assert_close(trimmed, full, rtol=1e-5, atol=1e-5)


def test_guidance_changes_what_a_distilled_model_is_told(family, exported):
    latents = torch.zeros(1, 16, 8, 8)
    prompts = exported.model.encode_prompts(["x"])
    transformer = exported.model.load("transformer")
    stored = [
        exported.model.adapter.embed(transformer, latents, torch.tensor([500.0]), prompts, guidance)[1]
        for guidance in (1.0, 4.0)
    ]
    name = exported.model.adapter.predict_inputs[0]
    assert torch.equal(stored[0][name], stored[1][name]) == (family in ("sana-1.5", "flux-schnell", "sd3.5"))


def test_a_vae_of_another_model_is_refused(exported, photos_dir, tmp_path):
    shutil.copytree(exported.model.dir, tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"in_channels": config["in_channels"] * 2}))
    with pytest.raises(ValueError, match=r"latents of 16 channels, the transformer takes 32"):
        Exporter(export_config(tmp_path / "model", cut=(0, 1)), photos_dir, tmp_path / "bundle")
