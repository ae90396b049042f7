"""The SANA family: `SanaTransformer2DModel` with linear self-attention, cross-attention to the prompt, and Mix-FFN.

SANA 1.0 (arXiv 2410.10629), SANA-1.5 (normalised queries and keys) and SANA-Sprint (a guidance embedding as well) share the
class. Shape suffixes as in export/ops.py.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import diffusers
import torch
from torch import Tensor

from export import ops
from export.block_programs import BlockFunction, PredictFunction, Tensors
from export.ops import FrozenLinears
from host.models.base import (
    BlankEncoder,
    BlockRef,
    PromptRequest,
    PromptStates,
    Sampler,
    TransformerConfig,
    bare_pipeline,
    register_model,
    require_short,
    swapped_processors,
    tile_tokens,
)

MAX_PROMPT_TOKENS = 300
MASKED = -10000.0
"""Added to a masked prompt token's score, as diffusers does."""
QK_NORM_EPSILON = 1e-5


class SanaAdapter:
    """See `ModelAdapter`."""

    family = "sana"
    pipeline: Any = diffusers.SanaPipeline
    normalized_config = TransformerConfig
    lora_prefix = "transformer"
    prompt_inputs: tuple[str, ...] = ("context", "context_bias")
    per_block_inputs: tuple[str, ...] = ()
    predict_inputs: tuple[str, ...] = ("embedded_timestep",)

    def takes_negative(self, config: TransformerConfig) -> bool:
        return not config.guidance_embeds

    def encode_prompts(self, load: Callable[[str], Any], request: PromptRequest) -> PromptStates:
        tokenizer = load("tokenizer")
        max_tokens = min(request.max_tokens or MAX_PROMPT_TOKENS, tokenizer.model_max_length)
        require_short(tokenizer, request.texts, max_tokens)
        # The instruction SANA was trained with is written for Gemma; the pipeline leaves it out of negative prompts.
        instruct = "gemma" in type(tokenizer).__name__.lower() and not request.negative
        call = inspect.signature(self.pipeline.__call__).parameters
        encoder = BlankEncoder(request.config.caption_channels) if request.blank else load("text_encoder")
        states, mask, _, _ = bare_pipeline(self.pipeline, tokenizer=tokenizer, text_encoder=encoder).encode_prompt(
            request.texts,
            do_classifier_free_guidance=False,
            device=torch.device("cpu"),
            max_sequence_length=max_tokens,
            complex_human_instruction=call["complex_human_instruction"].default if instruct else None,
        )
        # Masked tokens change nothing, so what no prompt uses is left out.
        used = mask.any(0)
        return PromptStates(states[:, used].float(), mask[:, used])

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: PromptStates, guidance: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = transformer.config
        _require_supported(config)
        hidden_BTD = transformer.patch_embed(latents)
        if config.guidance_embeds:  # SANA-Sprint takes times from 0 to 1
            scale = torch.full_like(timesteps, guidance * config.guidance_embeds_scale)
            modulation, embedded_BD = transformer.time_embed(
                timesteps / 1000, guidance=scale, hidden_dtype=latents.dtype
            )
        else:
            modulation, embedded_BD = transformer.time_embed(
                timesteps * config.timestep_scale, batch_size=len(latents), hidden_dtype=latents.dtype
            )
        context_BLD = transformer.caption_norm(transformer.caption_projection(prompts.states))
        conditioning = {
            "context": context_BLD,
            "context_bias": (1 - prompts.mask.to(latents.dtype)) * MASKED,
            "modulation": modulation.view(len(latents), 6, -1),
            "embedded_timestep": embedded_BD,
        }
        return hidden_BTD, conditioning

    def run_block(
        self, transformer: Any, index: int, hidden: Tensor, conditioning: Tensors, grid: tuple[int, int]
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

    def mask_text(self, transformer: Any, blocks: Iterable[int]) -> AbstractContextManager[None]:
        # A softmax over no key has no value. No text reaches the block, so cross attention adds nothing: neither an average
        # of values, which the prompt would still show in, nor the output bias, which is part of what it adds.
        attentions = [transformer.transformer_blocks[index].attn2 for index in blocks]
        return swapped_processors(attentions, lambda processor: _adds_nothing)

    def block_inputs(
        self, transformer: Any, index: int, conditioning: Tensors, layers: Sequence[str]
    ) -> dict[str, Tensor]:
        return {name: conditioning[name] for name in ("context", "context_bias", "modulation")}

    def block_weights(self, transformer: Any, index: int, layers: Sequence[str]) -> dict[str, Tensor]:
        weights = transformer.transformer_blocks[index].state_dict()
        # 1x1 convolutions are linear layers over the channels.
        return {n: w.flatten(1) if w.ndim == 4 and w.shape[2:] == (1, 1) else w for n, w in weights.items()}

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        heads, cross_heads = transformer.config.num_attention_heads, transformer.config.num_cross_attention_heads
        epsilon = transformer.config.norm_eps

        def block(hidden_TD: Tensor, conditioning: Tensors, weights: Tensors, linear: FrozenLinears) -> Tensor:
            modulation_6D = weights["scale_shift_table"] + conditioning["modulation"]
            shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (modulation_6D[i : i + 1] for i in range(6))

            def normed(layer: str, x: Tensor) -> Tensor:
                weight = weights.get(f"{layer}.weight")
                return x if weight is None else ops.rms_norm(x, weight, QK_NORM_EPSILON)

            x_TD = ops.modulate(ops.layer_norm(hidden_TD, epsilon), shift_1, scale_1)
            query_TD = normed("attn1.norm_q", linear("attn1.to_q", x_TD))
            key_TD = normed("attn1.norm_k", linear("attn1.to_k", x_TD))
            attended_TD = ops.linear_attention(query_TD, key_TD, linear("attn1.to_v", x_TD), heads)
            hidden_TD = hidden_TD + gate_1 * linear("attn1.to_out.0", attended_TD)

            context_LD = conditioning["context"]
            query_TD = normed("attn2.norm_q", linear("attn2.to_q", hidden_TD))
            key_LD = normed("attn2.norm_k", linear("attn2.to_k", context_LD))
            attended_TD = ops.softmax_attention(
                ops.split_heads(query_TD, cross_heads),
                ops.split_heads(key_LD, cross_heads),
                ops.split_heads(linear("attn2.to_v", context_LD), cross_heads),
                conditioning["context_bias"],
            )
            hidden_TD = hidden_TD + linear("attn2.to_out.0", attended_TD)

            x_TD = ops.layer_norm(hidden_TD, epsilon, weights.get("norm2.weight"), weights.get("norm2.bias"))
            x_TC = ops.silu(linear("ff.conv_inverted", ops.modulate(x_TD, shift_2, scale_2)))
            x_TC = ops.depthwise_conv(x_TC, weights["ff.conv_depth.weight"], weights["ff.conv_depth.bias"], grid)
            x_TC, switch_TC = ops.split(x_TC, x_TC.shape[1] // 2, 1)
            return hidden_TD + gate_2 * linear("ff.conv_point", x_TC * ops.silu(switch_TC))

        return block

    def run_output(self, transformer: Any, hidden: Tensor, conditioning: Tensors) -> Tensor:
        normed = transformer.norm_out(hidden, conditioning["embedded_timestep"], transformer.scale_shift_table)
        return transformer.proj_out(normed)

    def predict_weights(self, transformer: Any) -> dict[str, Tensor]:
        return {
            "scale_shift_table": transformer.scale_shift_table.data,
            "proj_out.weight": transformer.proj_out.weight.data,
            "proj_out.bias": transformer.proj_out.bias.data,
        }

    def predict_function(self, transformer: Any) -> PredictFunction:
        def predict(hidden_TD: Tensor, conditioning: Tensors, weights: Tensors) -> Tensor:
            table_2D = weights["scale_shift_table"] + conditioning["embedded_timestep"]
            x_TD = ops.modulate(ops.layer_norm(hidden_TD, 1e-6), table_2D[0:1], table_2D[1:2])
            return FrozenLinears(weights, {}, 1.0)("proj_out", x_TD)

        return predict

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        return tile_tokens(velocity, transformer.config.patch_size)

    def sample(
        self, run: Sampler, prompts: PromptStates, negative: PromptStates | None, latents: Tensor, steps: int
    ) -> Tensor:
        length = max(part.states.shape[1] for part in (prompts, negative) if part)
        prompts = _padded(prompts, length)
        settings: dict[str, Any] = {
            "prompt_embeds": prompts.states,
            "prompt_attention_mask": prompts.mask,
            "latents": latents,
        }
        if negative is None:
            # SANA-Sprint; the pipeline's own intermediate time is that of two steps.
            settings |= {} if steps == 2 else {"intermediate_timesteps": None}
        else:
            negative = _padded(negative, length)
            settings |= {"negative_prompt": None, "negative_prompt_embeds": negative.states}
            settings |= {"negative_prompt_attention_mask": negative.mask}
        return run(use_resolution_binning=False, **settings)


def _adds_nothing(
    attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None
) -> Tensor:
    """An attention processor without a key to attend to."""
    return torch.zeros_like(hidden_states)


def _padded(prompts: PromptStates, length: int) -> PromptStates:
    """Adds masked tokens up to a length."""
    missing = length - prompts.states.shape[1]
    pad = torch.nn.functional.pad
    return PromptStates(pad(prompts.states, (0, 0, 0, missing)), pad(prompts.mask, (0, missing)))


def _require_supported(config: Any) -> None:
    """Refuses variants whose maths the block function does not have."""
    known = {"qk_norm": (None, "rms_norm_across_heads")}
    wrong = {name: config[name] for name, values in known.items() if config[name] not in values}
    if config.cross_attention_dim is None:
        wrong["cross_attention_dim"] = None
    if wrong:
        raise ValueError(f"This SANA variant is not supported: {wrong}; known are SANA 1.0, SANA-1.5 and SANA-Sprint.")


register_model("SanaTransformer2DModel", SanaAdapter())
