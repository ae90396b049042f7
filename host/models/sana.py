"""The SANA family: `SanaTransformer2DModel` with linear self-attention, cross-attention to the prompt, and Mix-FFN.

Shape suffixes as in export/ops.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from export import ops
from export.block_programs import BlockFunction, PredictFunction
from export.ops import FrozenLinears
from host.models.base import BlockRef, PromptStates, register_model

SanaPipeline: Any = diffusers.SanaPipeline
MAX_PROMPT_TOKENS = 300
MASKED = -10000.0
"""Added to a masked prompt token's score, as diffusers does."""


class SanaAdapter:
    """See `ModelAdapter`."""

    family = "sana"
    lora_prefix = "transformer"
    prompt_inputs: tuple[str, ...] = ("context", "context_bias")
    block_conditioning: tuple[str, ...] = ("context", "context_bias", "modulation")
    predict_conditioning: tuple[str, ...] = ("embedded_timestep",)

    def patch_size(self, config: Mapping[str, Any]) -> int:
        return config["patch_size"]

    def encode_prompts(self, tokenizer: Any, text_encoder: Any, prompts: Sequence[str]) -> PromptStates:
        pipeline = SanaPipeline(tokenizer, text_encoder, None, None, None)
        with torch.no_grad():
            states, mask, _, _ = pipeline.encode_prompt(
                list(prompts), do_classifier_free_guidance=False, max_sequence_length=_prompt_length(tokenizer)
            )
        return PromptStates(states.float(), mask)

    def blank_prompts(self, config: Mapping[str, Any], tokenizer: Any) -> PromptStates:
        length = _prompt_length(tokenizer)
        return PromptStates(
            torch.zeros(1, length, config["caption_channels"]), torch.ones(1, length, dtype=torch.int64)
        )

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: PromptStates
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _require_supported(transformer)
        hidden_BTD = transformer.patch_embed(latents)
        modulation_B6D, embedded_BD = transformer.time_embed(
            timesteps * transformer.config.timestep_scale, batch_size=len(latents), hidden_dtype=latents.dtype
        )
        context_BLD = transformer.caption_norm(transformer.caption_projection(prompts.states))
        conditioning = {
            "context": context_BLD,
            "context_bias": (1 - prompts.mask.to(latents.dtype)) * MASKED,
            "modulation": modulation_B6D.view(len(latents), 6, -1),
            "embedded_timestep": embedded_BD,
        }
        return hidden_BTD, conditioning

    def run_block(
        self,
        transformer: Any,
        index: int,
        hidden: Tensor,
        conditioning: Mapping[str, Tensor],
        grid: tuple[int, int],
    ) -> Tensor:
        return transformer.transformer_blocks[index](
            hidden,
            None,
            conditioning["context"],
            conditioning["context_bias"][:, None],
            conditioning["modulation"].flatten(1),
            *grid,
        )

    def blocks(self, transformer: Any) -> list[BlockRef]:
        return [BlockRef("sana_block", f"transformer_blocks.{i}") for i in range(len(transformer.transformer_blocks))]

    def block_weights(self, transformer: Any, index: int) -> dict[str, Tensor]:
        weights = transformer.transformer_blocks[index].state_dict()
        # 1x1 convolutions are linear layers over the channels.
        return {n: w.flatten(1) if w.ndim == 4 and w.shape[2:] == (1, 1) else w for n, w in weights.items()}

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        heads, cross_heads = transformer.config.num_attention_heads, transformer.config.num_cross_attention_heads
        epsilon = transformer.config.norm_eps

        def block(
            hidden_TD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor], linear: FrozenLinears
        ) -> Tensor:
            modulation_6D = weights["scale_shift_table"] + conditioning["modulation"]
            shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (modulation_6D[i : i + 1] for i in range(6))

            x_TD = ops.modulate(ops.layer_norm(hidden_TD, epsilon), shift_1, scale_1)
            query_TD, key_TD, value_TD = (linear(f"attn1.to_{name}", x_TD) for name in "qkv")
            attended_TD = ops.linear_attention(query_TD, key_TD, value_TD, heads)
            hidden_TD = hidden_TD + gate_1 * linear("attn1.to_out.0", attended_TD)

            context_LD = conditioning["context"]
            query_TD = linear("attn2.to_q", hidden_TD)
            key_LD, value_LD = linear("attn2.to_k", context_LD), linear("attn2.to_v", context_LD)
            attended_TD = ops.softmax_attention(query_TD, key_LD, value_LD, conditioning["context_bias"], cross_heads)
            hidden_TD = hidden_TD + linear("attn2.to_out.0", attended_TD)

            x_TD = ops.modulate(ops.layer_norm(hidden_TD, epsilon), shift_2, scale_2)
            x_TC = ops.silu(linear("ff.conv_inverted", x_TD))
            x_TC = ops.depthwise_conv(x_TC, weights["ff.conv_depth.weight"], weights["ff.conv_depth.bias"], grid)
            half = x_TC.shape[1] // 2
            x_TC = x_TC[:, :half] * ops.silu(x_TC[:, half:])
            return hidden_TD + gate_2 * linear("ff.conv_point", x_TC)

        return block

    def predict_weights(self, transformer: Any) -> dict[str, Tensor]:
        return {
            "scale_shift_table": transformer.scale_shift_table.data,
            "proj_out.weight": transformer.proj_out.weight.data,
            "proj_out.bias": transformer.proj_out.bias.data,
        }

    def predict_function(self, transformer: Any) -> PredictFunction:
        def predict(hidden_TD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
            table_2D = weights["scale_shift_table"] + conditioning["embedded_timestep"]
            x_TD = ops.modulate(ops.layer_norm(hidden_TD, 1e-6), table_2D[0:1], table_2D[1:2])
            return FrozenLinears(weights, {}, 1.0)("proj_out", x_TD)

        return predict

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        p = transformer.config.patch_size
        batch, channels, height, width = velocity.shape
        tiles = velocity.reshape(batch, channels, height // p, p, width // p, p)
        return tiles.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, p * p * channels)

    def denoise(
        self,
        transformer: Any,
        scheduler: Any,
        prompts: PromptStates,
        negative: PromptStates,
        latents: Tensor,
        *,
        steps: int,
        guidance: float,
    ) -> Tensor:
        pipeline = SanaPipeline(None, None, None, transformer, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(
            prompt_embeds=prompts.states,
            prompt_attention_mask=prompts.mask,
            negative_prompt=None,
            negative_prompt_embeds=negative.states,
            negative_prompt_attention_mask=negative.mask,
            latents=latents,
            num_inference_steps=steps,
            guidance_scale=guidance,
            use_resolution_binning=False,
            output_type="latent",
        ).images

    def load_lora(self, transformer: Any, adapter_path: Path) -> None:
        state, metadata = SanaPipeline.lora_state_dict(adapter_path, return_lora_metadata=True)
        prefix = f"{self.lora_prefix}."
        modules = dict(transformer.named_modules())
        strays = [k for k in state if not k.startswith(prefix) or k[len(prefix) :].split(".lora_")[0] not in modules]
        if strays or not state:
            raise ValueError(
                f"{adapter_path}: {len(strays)} of {len(state)} keys match nothing in the model, e.g. {strays[:3]}."
            )
        SanaPipeline.load_lora_into_transformer(state, transformer=transformer, metadata=metadata)


def _prompt_length(tokenizer: Any) -> int:
    return min(MAX_PROMPT_TOKENS, tokenizer.model_max_length)


def _require_supported(transformer: Any) -> None:
    """Refuses variants whose maths the block function does not have."""
    config = transformer.config
    wrong = {name: config[name] for name in ("qk_norm", "cross_attention_dim") if _unsupported(config, name)}
    if config.guidance_embeds:
        wrong["guidance_embeds"] = True
    if config.norm_elementwise_affine:
        wrong["norm_elementwise_affine"] = True
    if wrong:
        raise ValueError(f"This SANA variant is not supported yet: {wrong}. Supported are SANA 1.0 configurations.")


def _unsupported(config: Mapping[str, Any], name: str) -> bool:
    value = config[name]
    return value is not None if name == "qk_norm" else value is None


register_model("SanaTransformer2DModel", SanaAdapter())
