"""Where models come from: folders, shards, variants, the hub's cache offline; what is refused by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import SanaTransformer2DModel

from host.exporter import Exporter
from host.models import ModelFolder, register_model
from host.models.base import adapter_of
from tests.tiny_models import SANA, export_config

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def resolve(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Finds a model in a process of its own: the hub's library reads its settings when it is imported."""
    code = f"from host.models import ModelFolder; print(ModelFolder({name!r}).dir)"
    settings = os.environ | {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=settings)


def test_a_hub_id_is_found_in_the_cache_when_offline(sana_dir, tmp_path):
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(sana_dir, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    done = resolve("someone/tiny", tmp_path, **OFFLINE)
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_an_id_that_cannot_be_had_says_what_to_do(tmp_path):
    done = resolve("someone/missing", tmp_path, **OFFLINE)
    assert "ValueError: Model 'someone/missing' is not a folder here and the hub did not give it" in done.stderr
    assert "accept the licence and log in if it is gated" in done.stderr


@pytest.mark.parametrize("options", [{"max_shard_size": "100KB"}, {"variant": "fp16"}], ids=["shards", "variant"])
def test_shards_and_variants_give_the_same_blocks(sana_dir, tmp_path, options):
    shutil.copytree(sana_dir, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "transformer")
    whole = SanaTransformer2DModel.from_pretrained(sana_dir, subfolder="transformer")
    whole.save_pretrained(tmp_path / "model" / "transformer", **options)
    model = ModelFolder(str(tmp_path / "model"), variant=options.get("variant"))
    transformer = model.hollow()
    with model.block(transformer, 3):
        for name, value in transformer.transformer_blocks[3].state_dict().items():
            assert torch.equal(value, whole.transformer_blocks[3].state_dict()[name])
    assert torch.equal(transformer.proj_out.weight, whole.proj_out.weight)
    if "variant" in options:
        with pytest.raises(ValueError, match=r"safetensors is missing\. Save the model as safetensors, or name its"):
            ModelFolder(str(tmp_path / "model")).hollow()


def test_an_export_never_holds_more_than_one_block(sana_dir, photos_dir, tmp_path, monkeypatch):
    held: list[int] = []
    lend = ModelFolder._fill

    def counted(self, module, prefix, names, device):
        lend(self, module, prefix, names, device)
        if prefix:
            hollow = transformers[-1]
            held.append(sum(not block.attn1.to_q.weight.is_meta for block in hollow.transformer_blocks))

    transformers: list[SanaTransformer2DModel] = []
    hollow = ModelFolder.hollow
    monkeypatch.setattr(
        ModelFolder, "hollow", lambda self, device="cpu": transformers.append(hollow(self)) or transformers[-1]
    )
    monkeypatch.setattr(ModelFolder, "_fill", counted)
    load = ModelFolder.load
    monkeypatch.setattr(
        ModelFolder, "load", lambda self, name: pytest.fail(name) if name == "transformer" else load(self, name)
    )
    exporter = Exporter(export_config(sana_dir, samples=3, seed=77), photos_dir, tmp_path / "bundle")
    exporter.run(lambda name, cached, seconds: None)
    assert set(held) == {1}
    assert len(held) == 5 + 2  # all blocks for the samples, the middle ones for the weights


def altered(sana_dir: Path, target: Path, **changes) -> str:
    shutil.copytree(sana_dir, target)
    path = target / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(target)


def test_weights_of_another_configuration_are_refused(sana_dir, tmp_path):
    model = ModelFolder(altered(sana_dir, tmp_path / "deep", num_layers=6))
    with pytest.raises(ValueError, match=r"the weights lack transformer_blocks\.5\.scale_shift_table and \d+ more"):
        next(iter([model.block(model.hollow(), 5).__enter__()]))
    model = ModelFolder(altered(sana_dir, tmp_path / "wide", mlp_ratio=3.0))
    with pytest.raises(ValueError, match=r"do not fit config\.json \(transformer_blocks\.0\.size mismatch"):
        model.block(model.hollow(), 0).__enter__()


def test_a_model_that_is_no_known_dit_is_refused_with_those_that_are(sana_dir, tmp_path):
    name = altered(sana_dir, tmp_path / "unet", _class_name="UNet2DConditionModel")
    with pytest.raises(
        ValueError, match=r"no adapter for 'UNet2DConditionModel'; supported: FluxTransformer2DModel, S"
    ):
        ModelFolder(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"not a diffusion transformer in diffusers' layout: .*model_index\.json is missing"
    ):
        ModelFolder(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="is registered already, by sana"):
        register_model("SanaTransformer2DModel", adapter_of("SanaTransformer2DModel", ""))


def test_the_skeleton_has_every_shape_and_no_memory(sana_dir):
    skeleton = ModelFolder(str(sana_dir)).skeleton()
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert skeleton.transformer_blocks[0].attn1.to_q.weight.shape == (64, 64)
    assert len(skeleton.transformer_blocks) == SANA["num_layers"]
