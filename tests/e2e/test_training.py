"""Training through the runtime on a tiny random SANA: does it learn, is it exact, does it survive."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from export.parity import check_parity
from host import residuals
from host.exporter import Exporter
from host.frozen_base import Patches, base_outputs, sample_tensors, token_grid
from host.models import PromptStates
from host.models.folder import load_lora
from runtime.adapter import LoraParameters
from runtime.bundle import Bundle, sha256_file
from runtime.errors import BudgetExceededError, BundleError, CheckpointError, NonFiniteLossError
from runtime.manifest import TrainingSpec
from runtime.metrics import read_metrics
from runtime.sample_store import SampleStore
from runtime.tensor_file import TensorFile
from runtime.trainer import ADAPTER, Trainer, choose_micro_batch, planned_private_bytes, train
from tests.tiny_models import rebuild_inputs

SETTINGS = TrainingSpec(steps=6, accumulation=2, learning_rate=1e-2, checkpoint_every=2, warmup_steps=2)


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def finished(bundle_dir, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    run = train(bundle_dir, run_dir, SETTINGS)
    assert run["status"] == "complete"
    return run_dir


def test_first_loss_equals_the_eager_full_models_on_the_same_samples(exporter, bundle_dir, finished):
    transformer = exporter.model.load("transformer")
    bundle = Bundle(bundle_dir)
    store = SampleStore([bundle.path(shard) for shard in bundle.manifest.samples.shards])
    first = read_metrics(finished)[0]
    expected = []
    for index in first["samples"]:
        identity = store.identity(index)
        noisy, velocity, prompts = rebuild_inputs(exporter, identity)
        with torch.no_grad():
            prediction = transformer(
                noisy,
                encoder_hidden_states=prompts.states,
                encoder_attention_mask=prompts.mask,
                timestep=torch.tensor([identity.timestep], dtype=torch.float32),
            ).sample
        expected.append(float((prediction - velocity).pow(2).mean()))
    assert first["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_stored_residuals_equal_recomputed_ones(exporter, bundle_dir):
    bundle = Bundle(bundle_dir)
    store = SampleStore([bundle.path(shard) for shard in bundle.manifest.samples.shards])
    transformer = exporter.model.load("transformer")
    for index in (0, 5, 11):
        sample = store.read(index)
        noisy, velocity, prompts = rebuild_inputs(exporter, sample.identity)
        noise = residuals.noise_of(sample.identity.seed, tuple(noisy.shape[1:]))[None]
        sigma = torch.tensor([sample.identity.sigma], dtype=torch.float32)
        patches = Patches(latents=noise - velocity, noise=noise, sigmas=sigma, prompts=prompts)
        (out,) = base_outputs(exporter.model, transformer, [patches], exporter.layers, 3.5)
        torch.testing.assert_close(sample.tensors["hidden"], out.hidden[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sample.tensors["tail_residual"], out.tail_residual[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sample.tensors["target"], out.target[0], rtol=1e-5, atol=1e-5)
        stored = sample_tensors(exporter.model, out)
        assert stored.keys() == sample.tensors.keys()
        for name, value in stored.items():
            torch.testing.assert_close(sample.tensors[name], value[0], rtol=1e-5, atol=1e-5)


def test_after_one_step_no_b_matrix_is_zero_and_after_two_every_matrix_moved(bundle_dir, tmp_path):
    start = LoraParameters(Bundle(bundle_dir)).named()
    assert all(value.any() == ("lora_A" in name) for name, value in start.items())
    for steps in (1, 2):
        run_dir = tmp_path / str(steps)
        train(bundle_dir, run_dir, TrainingSpec(steps=steps, accumulation=1, learning_rate=1e-3, weight_decay=0.0))
        saved = load_file(run_dir / ADAPTER)
        assert {f"transformer.{name}" for name in start} == set(saved)
        for name, value in start.items():
            # A's gradient is B's product, so A stays for one step.
            moved = not torch.equal(saved[f"transformer.{name}"], value)
            assert moved == (steps == 2 or "lora_B" in name), name
            assert saved[f"transformer.{name}"].any(), name


def test_training_lowers_the_loss(bundle_dir, tmp_path):
    settings = TrainingSpec(steps=40, accumulation=4, learning_rate=1e-2, checkpoint_every=100)
    train(bundle_dir, tmp_path / "run", settings)
    trace = losses(tmp_path / "run")
    assert sum(trace[-6:]) / 6 < 0.97 * sum(trace[:6]) / 6


def test_the_adapter_gives_diffusers_the_runtimes_prediction(exporter, bundle_dir, finished):
    trainer = Trainer(Bundle(bundle_dir))
    saved = load_file(finished / ADAPTER)
    for name, value in trainer.lora.named().items():
        value.copy_(saved[f"transformer.{name}"])
    sample = trainer.read(3)
    _, (hidden,) = trainer.forward([sample])

    transformer = exporter.model.load("transformer")
    noisy, _, prompts = rebuild_inputs(exporter, sample.identity)
    timestep = torch.tensor([sample.identity.timestep], dtype=torch.float32)
    arguments = {"encoder_hidden_states": prompts.states, "encoder_attention_mask": prompts.mask, "timestep": timestep}
    with torch.no_grad():
        base = transformer(noisy, **arguments).sample
        # Runtime's middle, then the host's own tail.
        conditioning = {name: value[None] for name, value in sample.tensors.items()}
        out = hidden[None]
        for index in range(exporter.middle.stop, len(exporter.blocks)):
            grid = token_grid(exporter.model, (8, 8))
            out = exporter.model.adapter.run_block(transformer, index, out, conditioning, grid)
        out = transformer.norm_out(out, conditioning["embedded_timestep"], transformer.scale_shift_table)
        ours = transformer.proj_out(out)
        load_lora(exporter.model.adapter, transformer, finished / ADAPTER)
        tuned = transformer(noisy, **arguments).sample
    theirs = exporter.model.adapter.target_tokens(transformer, tuned)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (tuned - base).abs().max() > 1e-3


def test_the_adapter_loads_with_load_lora_weights_and_keeps_alpha(exporter, finished):
    pipeline = diffusers.SanaPipeline(None, None, None, exporter.model.load("transformer"), None)
    pipeline.load_lora_weights(finished, weight_name=ADAPTER)
    settings = pipeline.transformer.peft_config["default_0"]
    assert (settings.r, settings.lora_alpha) == (2, 3.0)
    with safe_open(finished / ADAPTER, "pt") as file:
        keys, metadata = set(file.keys()), file.metadata()
    loaded = {name for name, _ in pipeline.transformer.named_parameters() if "lora_" in name}
    assert {f"transformer.{name.replace('.default_0', '')}" for name in loaded} == keys
    for name in ("version", "base", "cut", "rank", "alpha", "instance_prompt", "steps"):
        assert metadata[f"pocketdit.{name}"]
    assert metadata["pocketdit.cut"] == "1,2"


def test_an_adapter_with_foreign_keys_is_refused(exporter, finished, tmp_path):
    tensors = {f"unet.{name}": value for name, value in load_file(finished / ADAPTER).items()}
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="match nothing in the model"):
        load_lora(exporter.model.adapter, exporter.model.load("transformer"), tmp_path / "other.safetensors")


def test_stopping_and_resuming_twice_gives_the_same_trace_and_the_same_adapter(bundle_dir, finished, tmp_path):
    run_dir = tmp_path / "run"
    for stop_at in (1, 4):
        stop = iter([False] * (stop_at - len(losses(run_dir)) - 1) + [True])
        assert train(bundle_dir, run_dir, SETTINGS, should_stop=lambda stop=stop: next(stop))["status"] == "stopped"
        assert len(losses(run_dir)) == stop_at
        assert not (run_dir / ADAPTER).exists()
    assert train(bundle_dir, run_dir, SETTINGS)["status"] == "complete"
    assert losses(run_dir) == losses(finished)
    assert load_file(run_dir / ADAPTER).keys() == load_file(finished / ADAPTER).keys()
    assert sha256_file(run_dir / ADAPTER) == sha256_file(finished / ADAPTER)


def train_command(bundle_dir: Path, run_dir: Path) -> list[str]:
    settings = ["--steps", "60", "--set", "train.checkpoint_every=3", "--json"]
    return [sys.executable, "-m", "host.cli", "train", str(bundle_dir), "--run", str(run_dir), *settings]


@pytest.fixture(scope="module")
def undisturbed(bundle_dir, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(train_command(bundle_dir, run_dir), check=True, capture_output=True)
    return run_dir


@pytest.mark.parametrize("moment_s", [0.0, 0.05, 0.15, 0.3])
def test_a_kill_at_any_moment_loses_nothing(bundle_dir, undisturbed, tmp_path, moment_s):
    run_dir = tmp_path / "killed"
    process = subprocess.Popen(train_command(bundle_dir, run_dir), stdout=subprocess.DEVNULL)
    while not list(run_dir.glob("checkpoints/step_*.safetensors")) and process.poll() is None:
        time.sleep(0.005)
    time.sleep(moment_s)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(train_command(bundle_dir, run_dir), check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "complete"
    assert losses(run_dir) == losses(undisturbed)
    assert sha256_file(run_dir / ADAPTER) == sha256_file(undisturbed / ADAPTER)


def test_a_micro_batch_gives_the_same_adapter_from_half_the_bytes(bundle_dir, finished, tmp_path):
    runs = {size: tmp_path / str(size) for size in (1, 2)}
    for size, run_dir in runs.items():
        assert train(bundle_dir, run_dir, SETTINGS, micro_batch=size)["micro_batch"] == size
        assert (run_dir / ADAPTER).read_bytes() == (finished / ADAPTER).read_bytes()
    one, two = (read_metrics(run_dir)[-1]["streamed_bytes"] for run_dir in runs.values())
    samples = 2 * two - one  # weights are read once for two samples, the samples themselves as before
    assert 0 < samples < 0.5 * two
    with pytest.raises(ValueError, match="micro_batch: got 3, expected a divisor of the accumulation 2"):
        train(bundle_dir, tmp_path / "three", SETTINGS, micro_batch=3)


def test_where_memory_cannot_hold_the_weights_blocks_leave_the_page_cache_and_nothing_changes(
    bundle_dir, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr("runtime.weight_stream.available_bytes", lambda: 1000)
    forgotten = []
    release = TensorFile.release
    monkeypatch.setattr(
        TensorFile, "release", lambda file, forget: (forgotten.append(forget), release(file, forget=forget))
    )
    run = train(bundle_dir, tmp_path, replace(SETTINGS, steps=6), micro_batch=2)
    assert run["drops_behind"]
    # Two blocks: the last of the forward pass and the first of the backward pass are used again at once.
    # Before them the one block that takes XNNPACK's workspace.
    assert forgotten == [True] + [True, False, True, False] * 6
    assert (tmp_path / ADAPTER).read_bytes() == (finished / ADAPTER).read_bytes()


def test_the_largest_workspace_is_taken_before_the_first_step(bundle_dir, monkeypatch):
    trainer = Trainer(Bundle(bundle_dir), threads=1)
    first, second = trainer.blocks
    spec = trainer.programs.methods["sana_block_backward"]
    # A kind with fewer weights may well take more of it, as FLUX's single blocks do.
    trainer.blocks = (replace(first, kind="double"), replace(second, kind="single"))
    trainer.programs.methods = {
        "double_backward": replace(spec, workspace_bytes=130, planned_bytes=9),
        "single_backward": replace(spec, workspace_bytes=230, planned_bytes=5),
    }
    called = []
    monkeypatch.setattr(trainer.programs, "call", lambda name, inputs: called.append(name))
    trainer.reserve()
    assert called == ["single_backward"]


def test_the_budget_decides_how_many_samples_share_a_pass(bundle_dir):
    bundle = Bundle(bundle_dir)
    sizes = [planned_private_bytes(bundle, size) for size in (1, 2, 4)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert choose_micro_batch(bundle, 4, None) == 4
    assert choose_micro_batch(bundle, 4, 2 * sizes[2]) == 4
    assert choose_micro_batch(bundle, 4, round(sizes[1] / 0.9) + 1) == 2
    assert choose_micro_batch(bundle, 4, sizes[0]) == 1


@pytest.mark.parametrize(("weight_format", "loss_error", "cosine"), [("int8", 1e-3, 0.999), ("int4", 2e-2, 0.97)])
def test_a_bundle_with_narrow_weights_learns_what_float32_does(
    exporter, bundle_dir, photos_dir, tmp_path, weight_format, loss_error, cosine
):
    settings = replace(exporter.config.export, weights=weight_format, backend="xnnpack")
    Exporter(replace(exporter.config, export=settings), photos_dir, tmp_path / "bundle").run(lambda *_: None)
    trainers = [Trainer(Bundle(path), threads=1) for path in (bundle_dir, tmp_path / "bundle")]
    found = []
    for trainer in trainers:
        trainer.lora.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
        losses = trainer.accumulate([trainer.read(index) for index in range(4)], 0.25)
        found.append((sum(losses), trainer.lora.gradient))
    (exact, exact_gradient), (narrow, narrow_gradient) = found
    assert narrow == pytest.approx(exact, rel=loss_error)
    assert narrow != exact
    assert torch.cosine_similarity(exact_gradient, narrow_gradient, dim=0) > cosine
    sizes = [
        sum((path / b.file).stat().st_size for b in trainers[0].blocks) for path in (bundle_dir, tmp_path / "bundle")
    ]
    assert sizes[1] < {"int8": 0.4, "int4": 0.3}[weight_format] * sizes[0]


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(bundle_dir, finished, tmp_path, caplog):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    (run_dir / ADAPTER).unlink()
    newest = max((run_dir / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    train(bundle_dir, run_dir, SETTINGS)
    assert "is damaged" in caplog.text
    assert newest.name in caplog.text
    assert sha256_file(run_dir / ADAPTER) == sha256_file(finished / ADAPTER)


def test_other_settings_or_another_bundle_are_refused_and_both_values_named(bundle_dir, finished):
    with pytest.raises(CheckpointError, match=r"learning_rate: 0.01 then, 0.02 now"):
        train(bundle_dir, finished, TrainingSpec(steps=6, accumulation=2, learning_rate=2e-2, warmup_steps=2))


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(bundle_dir, finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    longer = TrainingSpec(steps=8, accumulation=2, learning_rate=1e-2, checkpoint_every=2, warmup_steps=2)
    train(bundle_dir, run_dir, longer)
    assert losses(run_dir)[:6] == losses(finished)
    assert len(losses(run_dir)) == 8


def poison(bundle_dir: Path, target: Path) -> Path:
    """A copy whose output layer is infinite, hashes made to match: only training can notice."""
    shutil.copytree(bundle_dir, target)
    path = target / "blocks" / "output.safetensors"
    tensors = load_file(path)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] + float("inf")
    save_file(tensors, path)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["blocks/output.safetensors"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def test_a_non_finite_loss_stops_and_is_not_saved(bundle_dir, tmp_path):
    with pytest.raises(NonFiniteLossError, match="sample"):
        train(poison(bundle_dir, tmp_path / "bundle"), tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run" / ADAPTER).exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert read_metrics(tmp_path / "run") == []
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_budget_below_the_plan_is_refused_before_anything_runs(exporter, bundle_dir, tmp_path):
    with pytest.raises(BudgetExceededError, match="the budget is 0 MiB"):
        train(bundle_dir, tmp_path / "run", SETTINGS, budget_mib=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["programs.pte", "blocks/001.safetensors", "lora_init.safetensors"])
def test_an_altered_file_is_refused_by_name(bundle_dir, tmp_path, name):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    path = tmp_path / "bundle" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=f"{name}: SHA-256"):
        train(tmp_path / "bundle", tmp_path / "run", SETTINGS)
    path.unlink()
    with pytest.raises(BundleError, match=f"{name}: got None bytes"):
        train(tmp_path / "bundle", tmp_path / "run", SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "pocketdit.bundle/99"}, "schema is 'pocketdit.bundle/99'"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"cut": {"head": "1", "tail": 2}}, "cut.head: got '1'"),
    ],
)
def test_a_manifest_of_another_form_is_refused(bundle_dir, tmp_path, change, message):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    path = tmp_path / "bundle" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Bundle(tmp_path / "bundle")


def test_weights_of_another_shape_are_refused(bundle_dir, tmp_path):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    path = tmp_path / "bundle" / "blocks" / "001.safetensors"
    tensors = load_file(path)
    tensors["attn1.to_q.weight"] = tensors["attn1.to_q.weight"][:-1].clone()
    save_file(tensors, path)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    manifest["files"]["blocks/001.safetensors"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (tmp_path / "bundle" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"attn1.to_q.weight has 63 rows, the program takes 64"):
        Bundle(tmp_path / "bundle")


def test_a_manifest_cannot_name_files_outside_the_bundle(bundle_dir, tmp_path):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    path = tmp_path / "bundle" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../secret"] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle(tmp_path / "bundle")


def test_parity_is_exact_in_float32(bundle_dir):
    assert check_parity(bundle_dir).relative_error < 1e-5


def test_metrics_account_for_the_step(finished):
    row = read_metrics(finished)[-1]
    parts = row["read_ms"] + row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"]
    assert 0 < parts <= row["step_ms"]
    assert row["peak_private_bytes"] >= row["private_bytes"] >= 0
    assert row["streamed_bytes"] > 0
    assert isinstance(PromptStates(torch.zeros(1, 1, 1), torch.ones(1, 1))[[0]], PromptStates)
