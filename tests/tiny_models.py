"""Tiny random models of every family, saved in diffusers' layout with all their components, and settings to export them.

Tokenizers know single characters: enough to tell prompts apart, and no vocabulary has to be shipped.
"""

import json
import string
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, AutoencoderTiny, FlowMatchEulerDiscreteScheduler
from torch import nn

from host import residuals
from host.config import Config, ExportConfig
from host.exporter import Exporter
from host.models import PromptStates
from runtime.manifest import TrainingSpec
from runtime.sample_store import SampleIdentity

PROMPT = "a photo of sks thing"
CHARACTERS = string.ascii_letters + string.digits + string.punctuation
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
SANA_15 = SANA | {"qk_norm": "rms_norm_across_heads", "caption_channels": 24, "norm_elementwise_affine": True}
SANA_SPRINT = SANA_15 | {"guidance_embeds": True}
FLUX = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}


SD3 = {
    "sample_size": 16,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 40,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 40,
    "pos_embed_max_size": 16,
    "qk_norm": "rms_norm",
}


def save_sana(folder: Path, vae: nn.Module, **changes: Any) -> Path:
    """A random SANA; text comes from MiniLM, as in the embedded model."""
    index = {
        "text_encoder": ["host.tiny_base.text_encoder", "MiniLMTextEncoder"],
        "tokenizer": ["host.tiny_base.text_encoder", "MiniLMTokenizer"],
    }
    return _save(folder, "SanaPipeline", "SanaTransformer2DModel", SANA | changes, {"vae": vae}, index)


def save_sana_with_gemma(folder: Path, config: dict[str, Any]) -> Path:
    """A random SANA with everything the published ones have: DC-AE, Gemma-2, its tokenizer."""
    torch.manual_seed(2)
    gemma = transformers.Gemma2Config(
        vocab_size=128,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=2048,
    )
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=16,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(4, 8, 16, 32),
        decoder_block_out_channels=(4, 8, 16, 32),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        encoder_qkv_multiscales=((), (), (), ()),
        decoder_qkv_multiscales=((), (), (), ()),
        scaling_factor=0.41407,
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = {token: i for i, token in enumerate([*special, "▁", "\n", *CHARACTERS])}
    parts = {
        "vae": autoencoder,
        "text_encoder": transformers.Gemma2Model(gemma),
        "tokenizer": transformers.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=4096),
    }
    pipeline = "SanaSprintPipeline" if config.get("guidance_embeds") else "SanaPipeline"
    if config.get("guidance_embeds"):
        parts["scheduler"] = diffusers.SCMScheduler(prediction_type="trigflow", sigma_data=0.5)
    return _save(folder, pipeline, "SanaTransformer2DModel", config, parts)


def save_flux(folder: Path, **changes: Any) -> Path:
    """A random FLUX with everything FLUX.1-dev has: AutoencoderKL, CLIP, T5, their tokenizers."""
    torch.manual_seed(3)
    parts = {
        "vae": _autoencoder_kl(),
        "text_encoder": transformers.CLIPTextModel(_clip_config()),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": _t5(24),
        "tokenizer_2": _t5_tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }
    return _save(folder, "FluxPipeline", "FluxTransformer2DModel", FLUX | changes, parts)


def save_sd3(folder: Path, **changes: Any) -> Path:
    """A random SD3 with everything SD3.5 has: AutoencoderKL, two CLIPs, T5, their tokenizers."""
    torch.manual_seed(4)
    parts = {
        "vae": _autoencoder_kl(),
        "text_encoder": transformers.CLIPTextModelWithProjection(_clip_config()),
        "tokenizer": _clip_tokenizer(),
        "text_encoder_2": transformers.CLIPTextModelWithProjection(_clip_config()),
        "tokenizer_2": _clip_tokenizer(),
        "text_encoder_3": _t5(40),
        "tokenizer_3": _t5_tokenizer(),
    }
    return _save(folder, "StableDiffusion3Pipeline", "SD3Transformer2DModel", SD3 | changes, parts)


def _autoencoder_kl() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 8, 8),
        latent_channels=16,
        norm_num_groups=2,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip_config() -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=256,
        hidden_size=20,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=20,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _clip_tokenizer() -> transformers.CLIPTokenizer:
    tokens = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(c + "</w>" for c in CHARACTERS)]
    return transformers.CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def _t5(width: int) -> transformers.T5EncoderModel:
    config = transformers.T5Config(vocab_size=128, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def _t5_tokenizer() -> transformers.T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in CHARACTERS)]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=64)


def _save(
    folder: Path,
    pipeline: str,
    transformer: str,
    config: dict[str, Any],
    parts: dict[str, Any],
    index: dict[str, list[str]] | None = None,
) -> Path:
    torch.manual_seed(0)
    parts = {
        "transformer": getattr(diffusers, transformer)(**config),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0),
    } | parts
    # Fresh layers are near zero in places; a trained model's are not, and zeros would hide a wrong formula.
    for name, parameter in parts["transformer"].named_parameters():
        if "norm" in name and parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    libraries = {name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline} | libraries | (index or {})))
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


def export_config(model: Path, **changes: Any) -> Config:
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


def rebuild_inputs(exporter: Exporter, identity: SampleIdentity) -> tuple[torch.Tensor, torch.Tensor, PromptStates]:
    """Noisy latents, target and prompt of a sample, from its identity alone."""
    plan = residuals.plan_samples(
        exporter.photos,
        count=exporter.config.export.samples,
        seed=0,
        side_min=exporter.patch_side,
        side_max=exporter.image_side,
        multiple=exporter.multiple,
        policy="low-to-high",
        flip_probability=0.0,
        distribution="logit_normal",
        shift=1.0,
    )
    assert plan.identities[identity.index] == identity
    latents = residuals.encode_patches(
        exporter.model, exporter.photos, plan, [identity.index], exporter.patch_side, exporter.image_side, 1
    )
    noise = residuals.noise_of(identity.seed, tuple(latents.shape[1:]))[None]
    prompts = exporter.model.encode_prompts([identity.prompt])
    return (1 - identity.sigma) * latents + identity.sigma * noise, noise - latents, prompts


def whole_prediction(
    transformer: Any, noisy: torch.Tensor, sigma: float, prompts: PromptStates, guidance: float
) -> torch.Tensor:
    """diffusers' whole model as the family's pipeline calls it, (1, C, H, W)."""
    time = torch.tensor([sigma], dtype=torch.float32)
    if isinstance(transformer, diffusers.FluxTransformer2DModel):
        pipeline = diffusers.FluxPipeline
        _, _, height, width = noisy.shape
        tokens = transformer(
            hidden_states=pipeline._pack_latents(noisy, *noisy.shape),
            encoder_hidden_states=prompts.states,
            pooled_projections=prompts.pooled,
            timestep=time,
            guidance=torch.tensor([guidance]) if transformer.config.guidance_embeds else None,
            img_ids=pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32),
            txt_ids=torch.zeros(prompts.states.shape[1], 3),
        ).sample
        return pipeline._unpack_latents(tokens, height * 8, width * 8, 8)
    arguments = {"timestep": time * 1000}
    if isinstance(transformer, diffusers.SD3Transformer2DModel):
        return transformer(noisy, prompts.states, prompts.pooled, **arguments).sample
    if transformer.config.guidance_embeds:
        scale = transformer.config.guidance_embeds_scale
        arguments = {"timestep": time, "guidance": torch.tensor([guidance * scale])}
    return transformer(
        noisy, encoder_hidden_states=prompts.states, encoder_attention_mask=prompts.mask, **arguments
    ).sample
