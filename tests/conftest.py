"""A tiny random SANA saved to disk in diffusers' layout, a few drawn photos, and bundles made from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel
from PIL import Image

from host.config import Config, ExportConfig
from host.exporter import Exporter
from runtime.manifest import TrainingSpec

PROMPT = "a photo of sks thing"
SANA = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 5,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": 384,
    "mlp_ratio": 2.5,
    "sample_size": 16,
    "patch_size": 2,
    "interpolation_scale": 1.0,
}


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory) -> Path:
    """Stages made by tests stay out of the user's cache and are shared within the session."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("POCKETDIT_CACHE", str(folder))
    yield folder
    patch.undo()


def save_sana(folder: Path, vae: torch.nn.Module, **changes) -> Path:
    """A random SANA in diffusers' layout; text comes from MiniLM, as in the embedded model."""
    torch.manual_seed(0)
    transformer = SanaTransformer2DModel(**(SANA | changes))
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "SanaPipeline",
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "vae": ["diffusers", type(vae).__name__],
        "text_encoder": ["host.tiny_base.text_encoder", "MiniLMTextEncoder"],
        "tokenizer": ["host.tiny_base.text_encoder", "MiniLMTokenizer"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def small_vae() -> AutoencoderTiny:
    torch.manual_seed(1)
    return AutoencoderTiny(
        latent_channels=16,
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
    )


@pytest.fixture(scope="session")
def sana_dir(tmp_path_factory) -> Path:
    return save_sana(tmp_path_factory.mktemp("models") / "tiny-sana", small_vae())


@pytest.fixture(scope="session")
def photos_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number, size in enumerate([(160, 200), (200, 160), (144, 144)]):
        coarse = rng.integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / f"photo {number}.png")
    return folder


def export_config(model: Path, **changes) -> Config:
    settings = {
        "model": str(model),
        "prompt": PROMPT,
        "cut": (1, 2),
        "samples": 12,
        "sample_dtype": "fp32",
        "backend": "portable",
        "lora_rank": 2,
        "lora_alpha": 3.0,
    } | changes
    return Config(
        export=ExportConfig(**settings),
        train=TrainingSpec(steps=6, accumulation=2, learning_rate=1e-2, checkpoint_every=2, warmup_steps=2),
    )


@pytest.fixture(scope="session")
def exporter(sana_dir, photos_dir, tmp_path_factory) -> Exporter:
    """An exporter that has run; its bundle is `exporter.bundle_dir`."""
    made = Exporter(export_config(sana_dir), photos_dir, tmp_path_factory.mktemp("bundles") / "bundle")
    made.run(lambda name, cached, seconds: None)
    return made


@pytest.fixture(scope="session")
def bundle_dir(exporter) -> Path:
    return exporter.bundle_dir
