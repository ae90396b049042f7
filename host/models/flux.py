"""The FLUX.1 family: `FluxTransformer2DModel` with double blocks (prompt and image apart) and single blocks (both as one).

The state the blocks hand on is prompt tokens, then image tokens. Modulations depend on timestep, guidance and pooled prompt
alone: they are computed here and stored with the sample, so their weights (a fifth of a single block) need not travel
unless LoRA targets them. Shape suffixes as in export/ops.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.nn import functional as F

from export import ops
from export.block_programs import BlockFunction, PredictFunction
from export.ops import FrozenLinears
from host.models.base import BlockRef, Geometry, PromptStates, bare_pipeline, register_model, require_short

MAX_PROMPT_TOKENS = 512
TRAINED_PIXELS = 512
"""Side the paper fine-tunes at."""
QK_NORM_EPSILON = 1e-6


class FluxAdapter:
    """See `ModelAdapter`."""

    family = "flux"
    pipeline: Any = diffusers.FluxPipeline
    lora_prefix = "transformer"
    prompt_inputs: tuple[str, ...] = ("rotary_cos", "rotary_sin")
    per_block_inputs: tuple[str, ...] = ("modulation",)
    predict_inputs: tuple[str, ...] = ("output_modulation",)

    def takes_negative(self, config: Mapping[str, Any]) -> bool:
        return False

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        # Four latents are packed into a token's channels.
        return Geometry(channels=config["in_channels"] // 4, patch_size=2, side=TRAINED_PIXELS // 8)

    def encode_prompts(
        self,
        load: Callable[[str], Any],
        prompts: Sequence[str],
        *,
        config: Mapping[str, Any],
        max_tokens: int | None,
        negative: bool,
        blank: bool,
    ) -> PromptStates:
        # T5's padding is not masked in FLUX: a shorter prompt is another prompt, so none is trimmed.
        tokenizer = load("tokenizer_2")
        max_tokens = min(max_tokens or MAX_PROMPT_TOKENS, tokenizer.model_max_length)
        require_short(tokenizer, prompts, max_tokens)
        mask = torch.ones(len(prompts), max_tokens, dtype=torch.int64)
        if blank:
            states = torch.zeros(len(prompts), max_tokens, config["joint_attention_dim"])
            return PromptStates(states, mask, torch.zeros(len(prompts), config["pooled_projection_dim"]))
        device = torch.device("cpu")
        with torch.no_grad():
            pooled = bare_pipeline(
                self, tokenizer=load("tokenizer"), text_encoder=load("text_encoder")
            )._get_clip_prompt_embeds(list(prompts), device=device)
            states = bare_pipeline(
                self, tokenizer_2=tokenizer, text_encoder_2=load("text_encoder_2")
            )._get_t5_prompt_embeds(list(prompts), max_sequence_length=max_tokens, device=device, dtype=torch.float32)
        return PromptStates(states.float(), mask, pooled.float())

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: PromptStates, guidance: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch, _, height, width = latents.shape
        image_BTD = transformer.x_embedder(_packed(latents))
        text_BLD = transformer.context_embedder(prompts.states)
        times = (
            (timesteps, torch.full_like(timesteps, guidance * 1000))
            if transformer.config.guidance_embeds
            else (timesteps,)
        )
        embedded_BD = transformer.time_text_embed(*times, prompts.pooled)
        image_ids = diffusers.FluxPipeline._prepare_latent_image_ids(
            batch, height // 2, width // 2, latents.device, latents.dtype
        )
        ids = torch.cat([torch.zeros(text_BLD.shape[1], 3, device=latents.device, dtype=latents.dtype), image_ids])
        cos_SK, sin_SK = transformer.pos_embed(ids)
        scale_BD, shift_BD = transformer.norm_out.linear(F.silu(embedded_BD)).chunk(2, 1)
        return torch.cat([text_BLD, image_BTD], 1), {
            "rotary_cos": cos_SK.float().expand(batch, -1, -1),
            "rotary_sin": sin_SK.float().expand(batch, -1, -1),
            "time_text": embedded_BD,
            "output_modulation": torch.stack([shift_BD, scale_BD], 1),
        }

    def run_block(
        self,
        transformer: Any,
        index: int,
        hidden: Tensor,
        conditioning: Mapping[str, Tensor],
        grid: tuple[int, int],
    ) -> Tensor:
        text, image = hidden.split([hidden.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], 1)
        rotary = (conditioning["rotary_cos"][0], conditioning["rotary_sin"][0])
        block = _all_blocks(transformer)[index]
        text, image = block(image, text, conditioning["time_text"], image_rotary_emb=rotary)
        return torch.cat([text, image], 1)

    def blocks(self, transformer: Any) -> list[BlockRef]:
        doubles = [f"transformer_blocks.{i}" for i in range(len(transformer.transformer_blocks))]
        singles = [f"single_transformer_blocks.{i}" for i in range(len(transformer.single_transformer_blocks))]
        return [BlockRef("flux_double", name) for name in doubles] + [BlockRef("flux_single", name) for name in singles]

    def block_inputs(
        self, transformer: Any, index: int, conditioning: Mapping[str, Tensor], layers: Sequence[str]
    ) -> dict[str, Tensor]:
        inputs = {name: conditioning[name] for name in ("rotary_cos", "rotary_sin")}
        norms = _modulation_layers(transformer, index)
        if any(name in layers for name in norms):
            return inputs | {"time_text": conditioning["time_text"]}
        block = _all_blocks(transformer)[index]
        embedded_BD = F.silu(conditioning["time_text"])
        rows = [block.get_submodule(name)(embedded_BD) for name in norms]
        return inputs | {"modulation": torch.cat(rows, 1).unflatten(1, (-1, embedded_BD.shape[1]))}

    def block_weights(self, transformer: Any, index: int, layers: Sequence[str]) -> dict[str, Tensor]:
        norms = _modulation_layers(transformer, index)
        ships_norms = any(name in layers for name in norms)
        weights = _all_blocks(transformer)[index].state_dict()
        return {n: w for n, w in weights.items() if ships_norms or n.rsplit(".", 1)[0] not in norms}

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        heads, num_image = transformer.config.num_attention_heads, grid[0] * grid[1]

        def modulation(conditioning: Mapping[str, Tensor], linear: FrozenLinears, norms: Sequence[str]) -> list[Tensor]:
            """Rows (1, D): stored with the sample, or made here where LoRA trains the layers that make them."""
            rows_MD = conditioning.get("modulation")
            if rows_MD is None:
                embedded_1D = ops.silu(conditioning["time_text"]).unsqueeze(0)
                rows = [linear(name, embedded_1D) for name in norms]
                rows_MD = torch.cat(rows, 1).view(-1, embedded_1D.shape[1])
            return [rows_MD[i : i + 1] for i in range(rows_MD.shape[0])]

        def heads_of(x_SD: Tensor, weight_K: Tensor) -> Tensor:
            return ops.rms_norm(ops.split_heads(x_SD, heads), weight_K, QK_NORM_EPSILON)

        def attention(conditioning: Mapping[str, Tensor], q_HSK: Tensor, k_HSK: Tensor, v_SD: Tensor) -> Tensor:
            cos_SK, sin_SK = conditioning["rotary_cos"], conditioning["rotary_sin"]
            q_HSK, k_HSK = ops.rotate(q_HSK, cos_SK, sin_SK), ops.rotate(k_HSK, cos_SK, sin_SK)
            return ops.softmax_attention(q_HSK, k_HSK, ops.split_heads(v_SD, heads))

        def single(
            hidden_SD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor], linear: FrozenLinears
        ) -> Tensor:
            shift_1D, scale_1D, gate_1D = modulation(conditioning, linear, ("norm.linear",))
            x_SD = ops.modulate(ops.layer_norm(hidden_SD, 1e-6), shift_1D, scale_1D)
            query_HSK = heads_of(linear("attn.to_q", x_SD), weights["attn.norm_q.weight"])
            key_HSK = heads_of(linear("attn.to_k", x_SD), weights["attn.norm_k.weight"])
            attended_SD = attention(conditioning, query_HSK, key_HSK, linear("attn.to_v", x_SD))
            wide = ops.gelu_tanh(linear("proj_mlp", x_SD))
            return hidden_SD + gate_1D * linear("proj_out", torch.cat([attended_SD, wide], 1))

        def double(
            hidden_SD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor], linear: FrozenLinears
        ) -> Tensor:
            rows = modulation(conditioning, linear, ("norm1.linear", "norm1_context.linear"))
            sizes = [hidden_SD.shape[0] - num_image, num_image]
            text_LD, image_TD = torch.split(hidden_SD, sizes)
            x_TD = ops.modulate(ops.layer_norm(image_TD, 1e-6), rows[0], rows[1])
            y_LD = ops.modulate(ops.layer_norm(text_LD, 1e-6), rows[6], rows[7])

            def joint(image_layer: str, text_layer: str) -> tuple[Tensor, Tensor]:
                return linear(f"attn.{text_layer}", y_LD), linear(f"attn.{image_layer}", x_TD)

            def joint_heads(image_layer: str, text_layer: str, name: str) -> Tensor:
                text, image = joint(image_layer, text_layer)
                text_HLK = heads_of(text, weights[f"attn.norm_added_{name}.weight"])
                return torch.cat([text_HLK, heads_of(image, weights[f"attn.norm_{name}.weight"])], 1)

            query_HSK, key_HSK = joint_heads("to_q", "add_q_proj", "q"), joint_heads("to_k", "add_k_proj", "k")
            attended_SD = attention(conditioning, query_HSK, key_HSK, torch.cat(joint("to_v", "add_v_proj")))
            text_attended_LD, image_attended_TD = torch.split(attended_SD, sizes)

            def finish(x: Tensor, attended: Tensor, out: str, ff: str, rows: Sequence[Tensor]) -> Tensor:
                gate_attention, shift, scale, gate = rows
                x = x + gate_attention * linear(out, attended)
                wide = ops.gelu_tanh(linear(f"{ff}.net.0.proj", ops.modulate(ops.layer_norm(x, 1e-6), shift, scale)))
                return x + gate * linear(f"{ff}.net.2", wide)

            image_TD = finish(image_TD, image_attended_TD, "attn.to_out.0", "ff", rows[2:6])
            text_LD = finish(text_LD, text_attended_LD, "attn.to_add_out", "ff_context", rows[8:12])
            return torch.cat([text_LD, image_TD])

        return {"flux_single": single, "flux_double": double}[kind]

    def predict_weights(self, transformer: Any) -> dict[str, Tensor]:
        return {"proj_out.weight": transformer.proj_out.weight.data, "proj_out.bias": transformer.proj_out.bias.data}

    def predict_function(self, transformer: Any) -> PredictFunction:
        def predict(hidden_TD: Tensor, conditioning: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
            rows_2D = conditioning["output_modulation"]
            x_TD = ops.modulate(ops.layer_norm(hidden_TD, 1e-6), rows_2D[0:1], rows_2D[1:2])
            return FrozenLinears(weights, {}, 1.0)("proj_out", x_TD)

        return predict

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        return _packed(velocity)

    def denoise(
        self,
        transformer: Any,
        scheduler: Any,
        prompts: PromptStates,
        negative: PromptStates | None,
        latents: Tensor,
        *,
        steps: int,
        guidance: float,
    ) -> Tensor:
        height, width = latents.shape[2:]
        packed = bare_pipeline(self, transformer=transformer, scheduler=scheduler)(
            prompt_embeds=prompts.states,
            pooled_prompt_embeds=prompts.pooled,
            latents=_packed(latents),
            height=height * 8,
            width=width * 8,
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type="latent",
        ).images
        return diffusers.FluxPipeline._unpack_latents(packed, height * 8, width * 8, 8)


def _packed(latents: Tensor) -> Tensor:
    return diffusers.FluxPipeline._pack_latents(latents, *latents.shape)


def _all_blocks(transformer: Any) -> list[Any]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def _modulation_layers(transformer: Any, index: int) -> tuple[str, ...]:
    is_double = index < len(transformer.transformer_blocks)
    return ("norm1.linear", "norm1_context.linear") if is_double else ("norm.linear",)


register_model("FluxTransformer2DModel", FluxAdapter())
