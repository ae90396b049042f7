"""Feature models: the same numbers as transformers' own models, what is found offline, what is refused by name."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, CLIPModel, Dinov2Model, ViTModel

from host.features import lite2_features, load_features
from tests.tiny_models import _clip_tokenizer

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
TEXTS = ["a dog", "a much longer text about a cat on a wooden table, with more words than the first"]


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Fresh layers are near zero in places; a trained model's are not, and zeros would hide a wrong formula."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def save_vit(folder: Path) -> Path:
    config = transformers.ViTConfig(**SMALL, patch_size=8)
    randomised(ViTModel(config, add_pooling_layer=False)).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_dinov2(folder: Path) -> Path:
    config = transformers.Dinov2Config(**SMALL, patch_size=8)
    randomised(Dinov2Model(config)).save_pretrained(folder)
    processor = transformers.BitImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}, image_mean=[0.485, 0.456, 0.406]
    )
    processor.save_pretrained(folder)
    return folder


def save_clip(folder: Path) -> Path:
    text = {"vocab_size": 256, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = SMALL | {"patch_size": 8}
    config = transformers.CLIPConfig(
        text_config={k: v for k, v in SMALL.items() if k != "image_size"} | text,
        vision_config=vision,
        projection_dim=20,
    )
    randomised(CLIPModel(config)).save_pretrained(folder)
    _clip_tokenizer().save_pretrained(folder)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return folder


SAVERS = {"vit": save_vit, "dinov2": save_dinov2, "clip": save_clip}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("features")
    return {kind: save(root / f"{'dino-' if kind == 'vit' else ''}{kind}") for kind, save in SAVERS.items()}


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(40, 60), (32, 32), (90, 50)] * 6
    return [Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)) for width, height in sizes]


def unit(features: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(features).numpy()


@torch.no_grad()
def by_transformers(kind: str, folder: Path, picture: Image.Image) -> np.ndarray:
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(picture, return_tensors="pt")
    if kind == "clip":
        return unit(CLIPModel.from_pretrained(folder).eval().get_image_features(**pixels).pooler_output)
    model = {"vit": ViTModel, "dinov2": Dinov2Model}[kind].from_pretrained(folder).eval()
    return unit(model(**pixels).last_hidden_state[:, 0])


@pytest.mark.parametrize("kind", SAVERS)
def test_pictures_get_the_features_of_transformers_own_model(kind, folders, pictures):
    got = load_features(str(folders[kind])).images(pictures)
    assert got.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-5)
    for row in (0, 2, 17):  # 17 is in the second batch
        np.testing.assert_allclose(got[row], by_transformers(kind, folders[kind], pictures[row])[0], atol=1e-5)


def test_the_class_token_is_taken_not_a_patch_or_the_mean(folders, pictures):
    """By hand from a ViT's parts: pixels (v - .5) / .5, embeddings, layers, norm, first token."""
    picture = Image.fromarray(np.asarray(pictures[1]))  # 32 x 32 already: nothing is resized
    model = ViTModel.from_pretrained(folders["vit"], add_pooling_layer=False).eval()
    pixels = torch.from_numpy((np.asarray(picture, np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]
    with torch.no_grad():
        states = model(pixel_values=pixels).last_hidden_state
    got = load_features(str(folders["vit"])).images([picture])
    np.testing.assert_allclose(got, unit(states[:, 0]), atol=1e-5)
    assert np.abs(got - unit(states[:, 1:].mean(1))).max() > 0.05


@torch.no_grad()
def test_texts_get_the_features_of_transformers_own_clip(folders):
    features = load_features(str(folders["clip"]))
    got = features.texts([*TEXTS, "w" * 500])
    model, tokenizer = CLIPModel.from_pretrained(folders["clip"]).eval(), _clip_tokenizer()
    for row, text in enumerate(TEXTS):
        expected = unit(model.get_text_features(**tokenizer([text], return_tensors="pt")).pooler_output)
        np.testing.assert_allclose(got[row], expected[0], atol=1e-5)
    assert got.shape == (3, 20)  # the longest is cut at the model's 77 tokens


def test_clips_cosines_are_those_of_its_own_logits(folders, pictures):
    """`CLIPModel.forward` compares pictures and texts itself."""
    features = load_features(str(folders["clip"]))
    got = features.images(pictures[:3]) @ features.texts(TEXTS).T
    model = CLIPModel.from_pretrained(folders["clip"]).eval()
    pixels = AutoImageProcessor.from_pretrained(folders["clip"], backend="pil")(pictures[:3], return_tensors="pt")
    tokens = _clip_tokenizer()(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**pixels, **tokens).logits_per_image / model.logit_scale.exp()
    np.testing.assert_allclose(got, logits.numpy(), atol=1e-5)


def test_titles_say_which_measure_it_is(folders):
    assert {kind: load_features(str(folder)).title for kind, folder in folders.items()} == {
        "vit": "DINO",
        "dinov2": "DINOv2",
        "clip": "CLIP",
    }
    assert [load_features(str(folder)).reads_text for folder in folders.values()] == [False, False, True]


def test_a_vit_that_is_not_dino_is_not_called_so(folders, tmp_path):
    shutil.copytree(folders["vit"], tmp_path / "vit-base")
    assert load_features(str(tmp_path / "vit-base")).title == "ViT"


def test_lite2_is_the_default_kind_and_reads_no_text(pictures):
    features = load_features("lite2")
    np.testing.assert_array_equal(features.images(pictures[:3]), lite2_features(pictures[:3]))
    assert features.images(pictures[:1]).shape == (1, 1280)
    with pytest.raises(ValueError, match="lite2 reads no text; take a CLIP model"):
        features.texts(["a dog"])


def test_weights_as_bin_are_read_as_plain_tensors_only(folders, tmp_path):
    folder = Path(shutil.copytree(folders["dinov2"], tmp_path / "bin"))
    model = Dinov2Model.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    picture = Image.new("RGB", (32, 32), "teal")
    expected = load_features(str(folders["dinov2"])).images([picture])
    np.testing.assert_allclose(load_features(str(folder)).images([picture]), expected, atol=1e-6)
    torch.save({"code": os.system}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="the weights cannot be loaded"):
        load_features(str(folder)).images([picture])


def test_a_hub_id_is_found_in_the_cache_when_offline_and_another_is_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--someone--dino" / "snapshots" / ("a" * 40)
    shutil.copytree(folders["vit"], snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    features, picture = load_features("someone/dino"), Image.new("RGB", (8, 8), "teal")
    assert (features.name, features.title) == ("someone/dino", "DINO")
    np.testing.assert_array_equal(features.images([picture]), load_features(str(folders["vit"])).images([picture]))
    message = "Model 'someone/missing' is not a folder here and the hub did not give it: it cannot be reached"
    with pytest.raises(ValueError, match=message):
        load_features("someone/missing")


def edit(folder: Path, name: str, change) -> None:
    path = folder / name
    if change is None:
        path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", None, r"config.json cannot be read .*Download or save the model again"),
        ("config.json", b"{", r"config.json is not JSON"),
        (
            "config.json",
            {"model_type": "bert"},
            r"got model_type 'bert', expected one of vit, dinov2, clip\. Take a DINO",
        ),
        ("model.safetensors", None, r"model.safetensors is missing\. Download or save the feature model again"),
        ("model.safetensors", b"\0" * 20, r"model.safetensors cannot be read: .*incomplete or damaged"),
        ("preprocessor_config.json", None, r"preprocessor_config.json cannot be loaded"),
        ("tokenizer.json", b"[]", r"the tokenizer cannot be loaded"),
    ],
)
def test_a_folder_that_is_broken_is_refused_before_anything_is_drawn(folders, tmp_path, name, change, message):
    folder = Path(shutil.copytree(folders["clip"], tmp_path / "model"))
    edit(folder, name, change)
    with pytest.raises(ValueError, match=message):
        load_features(str(folder))


def test_weights_of_another_model_are_refused(folders, tmp_path):
    folder = Path(shutil.copytree(folders["dinov2"], tmp_path / "model"))
    edit(folder, "config.json", {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"the weights lack \S+ and \d+ more\. Configuration and weights belong"):
        load_features(str(folder)).images([Image.new("RGB", (32, 32))])


@pytest.mark.parametrize("name", ["dino", "./nowhere/model", "/nowhere/model", "a/b/c", ""])
def test_a_name_that_is_no_model_is_refused(name):
    with pytest.raises(
        ValueError, match=r"is neither a folder here nor a hub id .* Give one such as facebook/dino-vits16"
    ):
        load_features(name)
