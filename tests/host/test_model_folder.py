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
from host.models import folder as folder_module
from host.models.base import adapter_of
from runtime.memory import MIB
from tests.tiny_models import SANA, export_config, save_sana, save_sd3, small_vae

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
    assert "it cannot be reached (OfflineModeIsEnabled)" in done.stderr.splitlines()[-1]


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


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def reindexed(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN = {
    "transformer cut short": (
        lambda d: truncated(d / "transformer" / "diffusion_pytorch_model.safetensors"),
        r"transformer/diffusion_pytorch_model\.safetensors cannot be read: .* incomplete or damaged\. Download",
    ),
    "vae cut short": (
        lambda d: truncated(d / "vae" / "diffusion_pytorch_model.safetensors"),
        r"vae/diffusion_pytorch_model\.safetensors cannot be read: .* incomplete",
    ),
    "text encoder cut short": (
        lambda d: truncated(d / "text_encoder_2" / "model.safetensors"),
        r"text_encoder_2/model\.safetensors cannot be read: .* incomplete",
    ),
    "no weights": (
        lambda d: (d / "transformer" / "diffusion_pytorch_model.safetensors").unlink(),
        r"transformer: diffusion_pytorch_model\.safetensors or model\.safetensors is missing",
    ),
    "weights as .bin": (
        lambda d: (d / "transformer" / "diffusion_pytorch_model.safetensors").rename(d / "transformer" / "a.bin"),
        r"transformer has its weights as \.bin only, expected safetensors\. Convert the model",
    ),
    "no vae": (lambda d: shutil.rmtree(d / "vae"), r"vae is missing or empty\. Download or save"),
    "no tokenizer": (lambda d: shutil.rmtree(d / "tokenizer_2"), r"tokenizer_2 is missing or empty"),
    "no text encoder": (lambda d: shutil.rmtree(d / "text_encoder_2"), r"text_encoder_2 is missing or empty"),
    "no scheduler": (lambda d: shutil.rmtree(d / "scheduler"), r"scheduler is missing or empty"),
    "a component unnamed": (
        lambda d: reindexed(d / "model_index.json", text_encoder_2=None),
        r"model_index\.json names no 'text_encoder_2'; FluxPipeline has one",
    ),
    "an unknown class": (
        lambda d: reindexed(d / "model_index.json", vae=["diffusers", "NoSuchAutoencoder"]),
        r"model_index\.json cannot be loaded \(AttributeError: .*NoSuchAutoencoder",
    ),
    "index not JSON": (lambda d: truncated(d / "model_index.json"), r"model_index\.json is not JSON"),
    "config not JSON": (
        lambda d: truncated(d / "transformer" / "config.json"),
        r"transformer/config\.json is not JSON \(.*\)\. Download",
    ),
    "vae config not JSON": (lambda d: truncated(d / "vae" / "config.json"), r"vae/config\.json is not JSON"),
    "encoder config not JSON": (
        lambda d: truncated(d / "text_encoder" / "config.json"),
        r"text_encoder/config\.json is not JSON",
    ),
    "config a list": (
        lambda d: (d / "transformer" / "config.json").write_text("[]"),
        r"transformer/config\.json: got a list, expected a JSON object",
    ),
    "config empty": (
        lambda d: (d / "transformer" / "config.json").write_text("{}"),
        r"transformer/config\.json has no '_class_name'",
    ),
    "config senseless": (
        lambda d: reindexed(d / "transformer" / "config.json", num_layers="many"),
        r"transformer/config\.json cannot be loaded \(TypeError",
    ),
    "config of a shallower model": (
        lambda d: reindexed(d / "transformer" / "config.json", num_layers=1),
        r"the weights have transformer_blocks\.1\.[^ ]+ and \d+ more, which config\.json does not make",
    ),
    "config of a wider model": (
        lambda d: reindexed(d / "transformer" / "config.json", num_attention_heads=8),
        r"diffusion_pytorch_model\.safetensors: .* is \(.*\), .*config\.json makes it \(",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_refused_at_once_and_the_file_named(flux_dir, photos_dir, tmp_path, damage, message):
    model = tmp_path / "model"
    shutil.copytree(flux_dir, model)
    damage(model)
    with pytest.raises(ValueError, match=message):
        Exporter(export_config(model, image_side=128, patch_side=64), photos_dir, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_shard_is_named_before_long_work(sana_dir, photos_dir, tmp_path):
    model = Path(shutil.copytree(sana_dir, tmp_path / "model"))
    shutil.rmtree(model / "transformer")
    whole = SanaTransformer2DModel.from_pretrained(sana_dir, subfolder="transformer")
    whole.save_pretrained(model / "transformer", max_shard_size="100KB")
    shard = sorted((model / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name} cannot be read: it is missing\. Download or save"):
        Exporter(export_config(model), photos_dir, tmp_path / "bundle")


@pytest.mark.parametrize("component", ["text_encoder_2", "vae", "scheduler", "transformer"])
def test_what_breaks_only_while_loading_names_the_component(flux_dir, tmp_path, component):
    model = ModelFolder(shutil.copytree(flux_dir, tmp_path / "model"))
    for path in (model.dir / component).iterdir():
        truncated(path)
    with pytest.raises(ValueError, match=rf"{component} cannot be loaded \(.*\)\. Download or save the model again"):
        model.load(component)


def test_text_encoders_of_another_width_are_refused(flux_dir, tmp_path):
    model = Path(shutil.copytree(flux_dir, tmp_path / "model"))
    save_sd3(tmp_path / "sd3")
    shutil.rmtree(model / "text_encoder_2")
    shutil.copytree(tmp_path / "sd3" / "text_encoder_3", model / "text_encoder_2")
    with pytest.raises(ValueError, match="the text encoders give states 40 wide, the transformer takes 24"):
        ModelFolder(str(model)).encode_prompts(["x"])


def test_a_prompt_that_clip_reads_in_part_is_warned_of_once(flux_dir, tmp_path, caplog):
    model = Path(shutil.copytree(flux_dir, tmp_path / "model"))
    reindexed(model / "tokenizer_2" / "tokenizer_config.json", model_max_length=512)
    for blank in (True, False):
        ModelFolder(str(model)).encode_prompts(["y" * 100, "short"], blank=blank)
    warned = [record for record in caplog.records if record.name == "host.models.base"]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert "has 102 tokens, CLIP reads the first 77" in warned[0].getMessage()


def test_a_setting_that_cannot_help_is_not_advised(flux_dir):
    with pytest.raises(ValueError, match=r"has 102 tokens, the model takes 64\. Shorten the prompt\.$"):
        ModelFolder(str(flux_dir)).encode_prompts(["y" * 100], blank=True)
    with pytest.raises(ValueError, match=r"takes 16\. Shorten the prompt or raise export\.prompt_tokens\.$"):
        ModelFolder(str(flux_dir)).encode_prompts(["y" * 20], max_tokens=16, blank=True)


def test_a_configuration_without_an_entry_has_diffusers_default(sana_dir, tmp_path):
    model = Path(shutil.copytree(sana_dir, tmp_path / "model"))
    path = model / "transformer" / "config.json"
    config = json.loads(path.read_text())
    del config["guidance_embeds"]
    path.write_text(json.dumps(config))
    folder = ModelFolder(str(model))
    assert folder.adapter.takes_negative(folder.normalized_config)


def test_a_unet_pipeline_is_called_one(tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]})
    )
    with pytest.raises(ValueError, match=r"is a UNet pipeline \(StableDiffusionPipeline\); PocketDiT trains diffusion"):
        ModelFolder(str(tmp_path))


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer_2"])
def test_the_hash_of_a_model_covers_every_component(flux_dir, tmp_path, component):
    model = Path(shutil.copytree(flux_dir, tmp_path / "model"))
    before = ModelFolder(str(model)).sha256()
    path = model / component / "config.json"
    path = path if path.is_file() else model / component / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    assert ModelFolder(str(model)).sha256() != before == ModelFolder(str(flux_dir)).sha256()


def test_each_file_is_hashed_once(flux_dir, monkeypatch):
    hashed: list[Path] = []
    whole = folder_module.sha256_file
    monkeypatch.setattr(folder_module, "sha256_file", lambda path: hashed.append(path) or whole(path))
    model = ModelFolder(str(flux_dir))
    model.sha256()
    model.sha256("transformer")
    model.sha256()
    assert len(hashed) == len(set(hashed))
    assert flux_dir / "text_encoder_2" / "model.safetensors" in hashed


def test_sources_shared_by_families_belong_to_those_that_use_them(flux_dir, sana_dir):
    names = {d: {Path(f).name for f in ModelFolder(str(d)).adapter_files()} for d in (flux_dir, sana_dir)}
    assert names == {flux_dir: {"base.py", "flux.py", "joint.py"}, sana_dir: {"base.py", "sana.py"}}


MEASURE = """
import sys
from pathlib import Path
from export import weights
from host.exporter import Exporter
from runtime.memory import memory_bytes
from tests.tiny_models import export_config

exporter = Exporter(export_config(Path(sys.argv[1]), cut=(0, 0)), Path(sys.argv[2]), Path(sys.argv[1]) / "bundle")
print(sum(4 * value.numel() for value in exporter._block_weights(0).values()))
transformer = exporter.model.hollow()
for index in range(len(exporter.blocks)):
    with exporter.model.block(transformer, index):
        print(memory_bytes()[0])
weights.save_weights = lambda path, tensors: print(memory_bytes()[0])
exporter._make_weights(Path())
"""


def test_private_memory_does_not_grow_with_depth(photos_dir, tmp_path):
    wide = {"num_attention_heads": 20, "attention_head_dim": 32, "num_cross_attention_heads": 10}
    wide |= {"cross_attention_head_dim": 64, "cross_attention_dim": 640, "num_layers": 12}
    model = save_sana(tmp_path / "model", small_vae(), **wide)
    # Weights of 16 bits become float32 in the heap; those of 32 stay mapped.
    SanaTransformer2DModel.from_pretrained(model / "transformer").bfloat16().save_pretrained(model / "transformer")
    # In a process of its own, as this one's heap has free pages already; with one thread the heap keeps less.
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEASURE, str(model), str(photos_dir)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    block_bytes, *private = map(int, done.stdout.split())
    assert 20 < block_bytes / MIB < 40
    assert len(private) == 12 + 12 + 2  # the blocks; the blocks, the output layers and the LoRA as they are written
    for part in (private[:12], private[12:]):
        assert max(part) - part[0] < 0.5 * block_bytes, [value // MIB for value in part]
