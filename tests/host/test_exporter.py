"""The export's stages: what they depend on, what is refused before long work, and that processes share it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from host.cache import cached_stage, stage_folder
from host.exporter import Exporter
from host.models import ModelFolder
from runtime.bundle import Bundle, sha256_file
from runtime.sample_store import SampleStore
from tests.tiny_models import PROMPT, export_config, save_sana, small_vae

FLUX_SIDES = {"image_side": 128, "patch_side": 64}


def run(exporter: Exporter) -> dict[str, bool]:
    """Runs an export; stage name to whether it came from the cache."""
    hits: dict[str, bool] = {}
    exporter.run(lambda name, cached, seconds: hits.__setitem__(name, cached))
    return hits


def store_of(bundle_dir: Path) -> SampleStore:
    bundle = Bundle(bundle_dir)
    return SampleStore([bundle.path(shard) for shard in bundle.manifest.samples.shards])


def test_a_second_export_is_all_cache_and_the_same_bytes(exporter, sana_dir, photos_dir, tmp_path):
    again = Exporter(export_config(sana_dir), photos_dir, tmp_path / "again")
    assert run(again) == {"samples": True, "weights": True, "programs": True, "bundle": False}
    first, second = (
        json.loads((d / "manifest.json").read_text())["files"] for d in (exporter.bundle_dir, tmp_path / "again")
    )
    assert first == second


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "another"},
        {"cut": (2, 2)},
        {"sample_dtype": "bf16"},
        {"patch_policy": "random"},
        {"seed": 1},
        {"samples": 13},
        {"image_side": 256},
        {"patch_side": 48},
        {"flip_probability": 0.5},
        {"sigma_shift": 2.0},
        {"background": (0, 0, 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_sample_depends_on_changes_its_key(exporter, sana_dir, photos_dir, tmp_path, change):
    other = Exporter(export_config(sana_dir, **change), photos_dir, tmp_path / "b")
    assert other._samples_key("model") != exporter._samples_key("model")


def test_what_a_sample_does_not_depend_on_leaves_its_key(exporter, sana_dir, photos_dir, tmp_path):
    other = Exporter(export_config(sana_dir, backend="xnnpack", lora_rank=3, batch_size=2), photos_dir, tmp_path / "b")
    assert other._samples_key("model") == exporter._samples_key("model")
    assert other._programs_key() != exporter._programs_key()


@pytest.mark.parametrize("component", ["vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
def test_every_component_that_makes_samples_changes_their_key(flux_dir, photos_dir, tmp_path, component):
    shutil.copytree(flux_dir, tmp_path / "model")
    config = next((tmp_path / "model" / component).glob("*config.json"))
    config.write_text(config.read_text() + "\n")
    keys = []
    for model in (flux_dir, tmp_path / "model"):
        other = Exporter(export_config(model, cut=(2, 1), **FLUX_SIDES), photos_dir, tmp_path / "b")
        keys.append((other._samples_key(other.model.sha256()), other._weights_key()))
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


def test_the_source_of_an_adapter_and_of_what_it_shares_is_in_every_key(flux_dir, photos_dir, tmp_path, monkeypatch):
    made = Exporter(export_config(flux_dir, cut=(2, 1), **FLUX_SIDES), photos_dir, tmp_path / "b")
    before = [made._samples_key("model"), made._weights_key(), made._programs_key()]
    edited = tmp_path / "joint.py"
    edited.write_text("edited")
    sources = [str(edited) if Path(f).name == "joint.py" else f for f in made.model.adapter_files()]
    monkeypatch.setattr(made.model, "adapter_files", lambda: sources)
    after = [made._samples_key("model"), made._weights_key(), made._programs_key()]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_middle_without_one_of_the_default_targets_is_exported(flux_dir, photos_dir, tmp_path):
    exporter = Exporter(export_config(flux_dir, cut=(2, 1), **FLUX_SIDES), photos_dir, tmp_path / "b")
    _, _, parity = exporter.run(lambda name, cached, seconds: None)
    assert set(exporter.layers.values()) == {("attn.to_q", "attn.to_k", "attn.to_v")}
    assert parity.relative_error < 1e-4


def test_a_cached_export_loads_no_weights(exporter, sana_dir, photos_dir, tmp_path, monkeypatch):
    loaded: list[str] = []
    load = ModelFolder.load
    monkeypatch.setattr(ModelFolder, "load", lambda self, name: loaded.append(name) or load(self, name))
    run(Exporter(export_config(sana_dir), photos_dir, tmp_path / "again"))
    assert set(loaded) == {"tokenizer"}


def test_another_model_of_the_same_shape_shares_programs_but_no_samples(exporter, sana_dir, photos_dir, tmp_path):
    shutil.copytree(sana_dir, tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    hits = run(Exporter(export_config(tmp_path / "model"), photos_dir, tmp_path / "b"))
    assert hits == {"samples": False, "weights": False, "programs": True, "bundle": False}


def test_an_altered_cache_file_is_made_again_and_a_failed_build_leaves_nothing():
    def build(folder: Path) -> None:
        (folder / "x").write_text("right")

    folder, hit = cached_stage("test", {"a": 1}, build)
    assert (hit, cached_stage("test", {"a": 1}, build)) == (False, (folder, True))
    (folder / "x").write_text("wrong")
    assert cached_stage("test", {"a": 1}, build) == (folder, False)
    assert (folder / "x").read_text() == "right"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        cached_stage("test", {"a": 2}, fail)
    assert list(folder.parent.iterdir()) == [folder]
    assert stage_folder("test", {"a": 2}) != folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cut": (3, 2)}, "leaves nothing to train: .* has 5 blocks"),
        ({"lora_targets": ("to_x",)}, "'to_x' matches no layer"),
        ({"lora_targets": "("}, "is no regular expression"),
        ({"lora_rank": 65}, r"rank 65 exceeds the size of attn1\.to_q, 64 x 64\. Lower export\.lora_rank"),
        ({"image_side": 100}, "image_side: got 100, expected a multiple of 16"),
        ({"patch_side": 256}, "patch_side 256 exceeds image_side 128"),
        ({"patch_policy": "full", "patch_side": 64}, "takes whole pictures"),
        ({"model": "/nowhere"}, "neither a folder here nor a hub id"),
        ({"prompt": None}, "photo 0.png"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_long_work(sana_dir, photos_dir, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Exporter(export_config(**({"model": sana_dir} | change)), photos_dir, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_variant_the_block_function_lacks_is_refused(photos_dir, tmp_path):
    model = save_sana(tmp_path / "model", small_vae(), qk_norm="rms_norm")
    with pytest.raises(ValueError, match="qk_norm"):
        Exporter(export_config(model), photos_dir, tmp_path / "b").plan()


def test_a_model_index_cannot_import_foreign_code(sana_dir, photos_dir, tmp_path):
    shutil.copytree(sana_dir, tmp_path / "model")
    path = tmp_path / "model" / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vae": ["subprocess", "Popen"]}))
    with pytest.raises(ValueError, match="wants code from 'subprocess'"):
        Exporter(export_config(tmp_path / "model"), photos_dir, tmp_path / "b")


@pytest.mark.parametrize("policy", ["low-to-high", "high-to-low", "random", "resize", "full"])
def test_every_policy_makes_the_samples_it_says(sana_dir, photos_dir, tmp_path, policy):
    run(Exporter(export_config(sana_dir, patch_policy=policy, samples=9), photos_dir, tmp_path / "b"))
    store = store_of(tmp_path / "b")
    identities = [store.identity(i) for i in range(9)]
    assert sorted({i.photo for i in identities}) == [f"photo {n}.png" for n in range(3)]
    assert all(sum(i.photo == f"photo {n}.png" for i in identities) == 3 for n in range(3))
    sides = [i.crop[2] for i in sorted(identities, key=lambda i: i.sigma)]
    if policy in ("resize", "full"):
        assert set(sides) == {128}
    elif policy != "random":
        assert sides == sorted(sides, reverse=policy == "high-to-low")
        assert sides[0] != sides[-1]
    assert store.read(0).tensors["hidden"].shape[0] == (64 if policy == "full" else 16)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_smaller_stores_stay_within_parity_and_report_their_error(sana_dir, photos_dir, tmp_path, dtype):
    exporter = Exporter(export_config(sana_dir, sample_dtype=dtype), photos_dir, tmp_path / "b")
    _, errors, parity = exporter.run(lambda name, cached, seconds: None)
    assert 0 < errors["hidden"] < 2e-2
    assert parity.relative_error < (2e-2 if dtype == "bf16" else 5e-2)


def test_sidecar_captions_give_each_sample_its_own_prompts_states(sana_dir, photos_dir, tmp_path):
    shutil.copytree(photos_dir, tmp_path / "photos")
    (tmp_path / "photos" / "photo 1.txt").write_text("a red one")
    before = {path: (sha256_file(path), path.stat().st_mtime_ns) for path in (tmp_path / "photos").iterdir()}
    run(Exporter(export_config(sana_dir), tmp_path / "photos", tmp_path / "b"))
    store = store_of(tmp_path / "b")
    contexts: dict[str, torch.Tensor] = {}
    for index in range(len(store)):
        sample = store.read(index)
        assert sample.identity.prompt == ("a red one" if sample.identity.photo == "photo 1.png" else PROMPT)
        context = contexts.setdefault(sample.identity.prompt, sample.tensors["context"])
        assert torch.equal(sample.tensors["context"], context)
    assert not torch.equal(*contexts.values())
    assert before == {path: (sha256_file(path), path.stat().st_mtime_ns) for path in (tmp_path / "photos").iterdir()}


@pytest.mark.long
def test_two_processes_make_the_same_samples_as_one(sana_dir, photos_dir, tmp_path):
    arguments = [
        "export",
        str(photos_dir),
        "--model",
        str(sana_dir),
        "--prompt",
        PROMPT,
        "--cut",
        "1,2",
        "--set",
        "export.samples=9",
    ]
    arguments += ["--set", "export.backend=portable", "--set", "export.sample_dtype=fp32"]
    environment = os.environ | {"POCKETDIT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29517",
        "-m",
        "host.cli",
    ]
    for name, launcher in (("one", [sys.executable, "-m", "host.cli"]), ("two", torchrun)):
        command = [*launcher, *arguments, "-o", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True, env=environment)
    one, two = store_of(tmp_path / "one"), store_of(tmp_path / "two")
    assert len(Bundle(tmp_path / "two").manifest.samples.shards) == 2
    for index in range(9):
        a, b = one.read(index), two.read(index)
        assert a.identity == b.identity
        for name in a.tensors:
            torch.testing.assert_close(a.tensors[name], b.tensors[name], rtol=1e-4, atol=1e-4)
