"""Pictures of base and adapter: same noise for both, what is recorded, what is refused."""

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from host.config import GenerateConfig
from host.generate import compared, generate
from host.models import ModelFolder
from runtime.errors import BundleError
from runtime.manifest import TrainingSpec
from runtime.tensor_file import write_tensor_file
from runtime.trainer import ADAPTER, train
from tests.tiny_models import PROMPT

UNSEEN = "a thing on a red table"
SETTINGS = GenerateConfig(prompts=(PROMPT, UNSEEN), seeds=(3, 4), steps=2, guidance=2.0, image_side=64)


@pytest.fixture(scope="module")
def trained(bundle_dir, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    train(bundle_dir, run_dir, TrainingSpec(steps=2, accumulation=1, learning_rate=0.3, warmup_steps=0))
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def pixels(run_dir: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(run_dir / "pictures" / name))


def test_every_prompt_and_seed_is_drawn_by_base_and_adapter_and_recorded(run_dir):
    result = generate(run_dir, SETTINGS)
    assert json.loads((run_dir / "pictures" / "pictures.json").read_text()) == result
    assert [(item["prompt"], item["seed"]) for item in result["items"]] == [
        (PROMPT, 3),
        (PROMPT, 4),
        (UNSEEN, 3),
        (UNSEEN, 4),
    ]
    assert [item["unseen"] for item in result["items"]] == [False, False, True, True]
    assert (result["steps"], result["guidance"], result["size"]) == (2, 2.0, 64)
    for kind in ("base", "adapter"):
        for item in result["items"]:
            assert pixels(run_dir, item[kind]).shape == (64, 64, 3)
        mean = np.mean([item[f"similarity_{kind}"] for item in result["items"]])
        assert result["similarity"][kind] == pytest.approx(mean, abs=1e-4)
    first, second = (pixels(run_dir, item["base"]) for item in result["items"][:2])
    assert not np.array_equal(first, second)
    assert all(not np.array_equal(pixels(run_dir, i["base"]), pixels(run_dir, i["adapter"])) for i in result["items"])


def test_an_adapter_of_zeros_draws_the_bases_pictures_to_the_bit(run_dir):
    with safe_open(run_dir / ADAPTER, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    write_tensor_file(run_dir / ADAPTER, {name: value * 0 for name, value in tensors.items()}, metadata)
    for item in generate(run_dir, SETTINGS)["items"]:
        np.testing.assert_array_equal(pixels(run_dir, item["base"]), pixels(run_dir, item["adapter"]))
        assert item["similarity_base"] == item["similarity_adapter"]


def test_encoders_transformer_and_autoencoder_are_loaded_once_and_one_after_the_other(run_dir, monkeypatch):
    loaded: list[str] = []
    transformers: list[weakref.ref] = []
    load = ModelFolder.load

    def watched(self, name):
        assert name == "scheduler" or not [ref for ref in transformers if ref() is not None], name
        loaded.append(name)
        part = load(self, name)
        if name == "transformer":
            transformers.append(weakref.ref(part))
        return part

    monkeypatch.setattr(ModelFolder, "load", watched)
    generate(run_dir, SETTINGS)
    heavy = [name for name in loaded if name in ("text_encoder", "transformer", "vae")]
    # The encoder twice: for the prompts, and for the negative one.
    assert heavy == ["text_encoder", "text_encoder", "transformer", "vae"]


@pytest.mark.parametrize("side", [8, 72, 100])
def test_a_side_that_is_not_made_of_tokens_is_refused(run_dir, side):
    with pytest.raises(ValueError, match=rf"image_side: got {side}, expected a multiple of 16"):
        generate(run_dir, GenerateConfig(seeds=(0,), steps=1, image_side=side))
    assert not (run_dir / "pictures").exists()


def test_without_prompts_the_instance_prompt_is_drawn(run_dir):
    result = generate(run_dir, GenerateConfig(seeds=(0,), steps=1, image_side=64))
    assert [item["prompt"] for item in result["items"]] == [PROMPT]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder\. Train first: pocketdit train"):
        generate(tmp_path, SETTINGS)


def test_a_run_without_an_adapter_is_refused(run_dir):
    (run_dir / ADAPTER).unlink()
    with pytest.raises(ValueError, match=r"has no adapter yet \(status 'complete'\)"):
        generate(run_dir, SETTINGS)
    assert not (run_dir / "pictures").exists()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("transformer/config.json", '"norm_eps": 1e-06', '"norm_eps": 1e-05'),
        ("vae/config.json", '"scaling_factor": 1.0', '"scaling_factor": 1.5'),
        ("scheduler/scheduler_config.json", '"shift": 1.0', '"shift": 3.0'),
        ("text_encoder/config.json", "", "{}"),
    ],
    ids=["transformer", "vae", "scheduler", "text encoder"],
)
def test_a_base_that_changed_since_the_export_is_refused(run_dir, sana_dir, bundle_dir, tmp_path, file, old, new):
    model, bundle = tmp_path / "model", tmp_path / "bundle"
    shutil.copytree(sana_dir, model)
    shutil.copytree(bundle_dir, bundle)
    for path in (bundle / "manifest.json", run_dir / "run.json"):
        text = path.read_text().replace(str(sana_dir), str(model)).replace(str(bundle_dir), str(bundle))
        path.write_text(text)
    compared(run_dir, SETTINGS)
    path = model / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.is_file() else ""
    path.write_text(before.replace(old, new) if old else new)
    assert path.read_text() != before
    with pytest.raises(BundleError, match=r"its hash differs\. Export again"):
        generate(run_dir, SETTINGS)
