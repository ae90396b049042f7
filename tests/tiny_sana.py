"""A tiny random SANA in diffusers' layout, and settings that export it in seconds."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel

from host.config import Config, ExportConfig
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
