"""The FLUX.1 family: `FluxTransformer2DModel` with double blocks (prompt and image apart) and single blocks (both as one).

The state the blocks hand on is prompt tokens, then image tokens. Modulations are stored with the sample (joint.py): their
weights are a fifth of a single block. Shape suffixes as in export/ops.py.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from torch import Tensor

from export import ops
from export.block_programs import BlockFunction, Tensors
from export.ops import FrozenLinears
from host.models import joint
from host.models.base import (
    BlockRef,
    PromptRequest,
    PromptStates,
    Sampler,
    TransformerConfig,
    bare_pipeline,
    register_model,
    require_short,
    warn_where_cut,
)

MAX_PROMPT_TOKENS = 512
TRAINED_PIXELS = 512
"""Side the paper fine-tunes at."""
NORMS = {"flux_double": ("norm1.linear", "norm1_context.linear"), "flux_single": ("norm.linear",)}
"""The layers that make each kind's modulations."""


class FluxConfig(TransformerConfig):
    """Four latents are packed into a token's channels."""

    patch_size = 2
    image_size = TRAINED_PIXELS // 8

    @property
    def num_channels(self) -> int:
        """Of the latents."""
        return self.config.in_channels // 4


class FluxAdapter:
    """See `ModelAdapter`."""

    family = "flux"
    pipeline: Any = diffusers.FluxPipeline
    normalized_config = FluxConfig
    lora_prefix = "transformer"
    prompt_inputs: tuple[str, ...] = ("rotary_cos", "rotary_sin")
    per_block_inputs: tuple[str, ...] = (joint.ROWS,)
    predict_inputs: tuple[str, ...] = (joint.OUTPUT_ROWS,)

    def takes_negative(self, config: TransformerConfig) -> bool:
        return False

    def encode_prompts(self, load: Callable[[str], Any], request: PromptRequest) -> PromptStates:
        # T5's padding is not masked in FLUX: a shorter prompt is another prompt, so none is trimmed.
        tokenizer, clip_tokenizer = load("tokenizer_2"), load("tokenizer")
        max_tokens = min(request.max_tokens or MAX_PROMPT_TOKENS, tokenizer.model_max_length)
        require_short(tokenizer, request.texts, max_tokens)
        warn_where_cut(clip_tokenizer, request.texts)
        mask = torch.ones(len(request.texts), max_tokens, dtype=torch.int64)
        if request.blank:
            return joint.blank_prompts(request.config, mask)
        device = torch.device("cpu")
        pooled = bare_pipeline(
            self.pipeline, tokenizer=clip_tokenizer, text_encoder=load("text_encoder")
        )._get_clip_prompt_embeds(request.texts, device=device)
        states = bare_pipeline(
            self.pipeline, tokenizer_2=tokenizer, text_encoder_2=load("text_encoder_2")
        )._get_t5_prompt_embeds(request.texts, max_sequence_length=max_tokens, device=device, dtype=torch.float32)
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
        return torch.cat([text_BLD, image_BTD], 1), {
            "rotary_cos": cos_SK.float().expand(batch, -1, -1),
            "rotary_sin": sin_SK.float().expand(batch, -1, -1),
            joint.EMBEDDING: embedded_BD,
            joint.OUTPUT_ROWS: joint.output_rows(transformer.norm_out, embedded_BD),
        }

    def run_block(
        self, transformer: Any, index: int, hidden: Tensor, conditioning: Tensors, grid: tuple[int, int]
    ) -> Tensor:
        rotary = (conditioning["rotary_cos"][0], conditioning["rotary_sin"][0])
        block = _all_blocks(transformer)[index]
        return joint.run_block(block, hidden, grid, conditioning[joint.EMBEDDING], image_rotary_emb=rotary)

    def blocks(self, transformer: Any) -> list[BlockRef]:
        doubles = [f"transformer_blocks.{i}" for i in range(len(transformer.transformer_blocks))]
        singles = [f"single_transformer_blocks.{i}" for i in range(len(transformer.single_transformer_blocks))]
        return [BlockRef("flux_double", name) for name in doubles] + [BlockRef("flux_single", name) for name in singles]

    @contextmanager
    def mask_text(self, transformer: Any, blocks: Iterable[int]) -> Iterator[None]:
        modules = _all_blocks(transformer)
        handles = [modules[index].register_forward_pre_hook(_mask_image_to_text, with_kwargs=True) for index in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def block_inputs(
        self, transformer: Any, index: int, conditioning: Tensors, layers: Sequence[str]
    ) -> dict[str, Tensor]:
        inputs = {name: conditioning[name] for name in ("rotary_cos", "rotary_sin")}
        block, norms = _all_blocks(transformer)[index], NORMS[self.blocks(transformer)[index].kind]
        return inputs | joint.inputs(block, norms, conditioning[joint.EMBEDDING], layers)

    def block_weights(self, transformer: Any, index: int, layers: Sequence[str]) -> dict[str, Tensor]:
        block, norms = _all_blocks(transformer)[index], NORMS[self.blocks(transformer)[index].kind]
        return joint.weights(block, norms, layers)

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        heads, num_image = transformer.config.num_attention_heads, grid[0] * grid[1]

        def heads_of(x_SD: Tensor, weight_K: Tensor) -> Tensor:
            return ops.rms_norm(x_SD.reshape(x_SD.shape[0], heads, -1), weight_K, joint.EPSILON)

        def attention(conditioning: Tensors, q_SHK: Tensor, k_SHK: Tensor, v_SD: Tensor) -> Tensor:
            q_HSK, k_HSK = (
                ops.rotate(x, conditioning["rotary_cos"], conditioning["rotary_sin"]) for x in (q_SHK, k_SHK)
            )
            return ops.softmax_attention(q_HSK, k_HSK, ops.split_heads(v_SD, heads))

        def single(hidden_SD: Tensor, conditioning: Tensors, weights: Tensors, linear: FrozenLinears) -> Tensor:
            shift_1D, scale_1D, gate_1D = joint.rows(conditioning, linear, NORMS["flux_single"])
            x_SD = ops.modulate(ops.layer_norm(hidden_SD, joint.EPSILON), shift_1D, scale_1D)
            query_SHK = heads_of(linear("attn.to_q", x_SD), weights["attn.norm_q.weight"])
            key_SHK = heads_of(linear("attn.to_k", x_SD), weights["attn.norm_k.weight"])
            attended_SD = attention(conditioning, query_SHK, key_SHK, linear("attn.to_v", x_SD))
            wide = ops.gelu_tanh(linear("proj_mlp", x_SD))
            return hidden_SD + gate_1D * linear("proj_out", torch.cat([attended_SD, wide], 1))

        def double(hidden_SD: Tensor, conditioning: Tensors, weights: Tensors, linear: FrozenLinears) -> Tensor:
            rows = joint.rows(conditioning, linear, NORMS["flux_double"])
            num_text = hidden_SD.shape[0] - num_image
            text_LD, image_TD = ops.split(hidden_SD, num_text)
            x_TD = ops.modulate(ops.layer_norm(image_TD, joint.EPSILON), rows[0], rows[1])
            y_LD = ops.modulate(ops.layer_norm(text_LD, joint.EPSILON), rows[6], rows[7])

            def both(image_layer: str, text_layer: str) -> tuple[Tensor, Tensor]:
                return linear(f"attn.{text_layer}", y_LD), linear(f"attn.{image_layer}", x_TD)

            def both_heads(image_layer: str, text_layer: str, name: str) -> Tensor:
                text, image = both(image_layer, text_layer)
                text_LHK = heads_of(text, weights[f"attn.norm_added_{name}.weight"])
                return torch.cat([text_LHK, heads_of(image, weights[f"attn.norm_{name}.weight"])])

            query_SHK, key_SHK = both_heads("to_q", "add_q_proj", "q"), both_heads("to_k", "add_k_proj", "k")
            attended_SD = attention(conditioning, query_SHK, key_SHK, torch.cat(both("to_v", "add_v_proj")))
            text_attended_LD, image_attended_TD = ops.split(attended_SD, num_text)

            image_TD = joint.end_of_stream(image_TD, image_attended_TD, "attn.to_out.0", "ff", rows[2:6], linear)
            text_LD = joint.end_of_stream(
                text_LD, text_attended_LD, "attn.to_add_out", "ff_context", rows[8:12], linear
            )
            return torch.cat([text_LD, image_TD])

        return {"flux_single": single, "flux_double": double}[kind]

    run_output = staticmethod(joint.run_output)
    predict_weights = staticmethod(joint.predict_weights)
    predict_function = staticmethod(joint.predict_function)

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        return _packed(velocity)

    def sample(
        self, run: Sampler, prompts: PromptStates, negative: PromptStates | None, latents: Tensor, steps: int
    ) -> Tensor:
        height, width = (side * 8 for side in latents.shape[2:])
        packed = run(
            latents=_packed(latents),
            height=height,
            width=width,
            prompt_embeds=prompts.states,
            pooled_prompt_embeds=prompts.pooled,
        )
        return diffusers.FluxPipeline._unpack_latents(packed, height, width, 8)


def _packed(latents: Tensor) -> Tensor:
    return diffusers.FluxPipeline._pack_latents(latents, *latents.shape)


def _mask_image_to_text(block: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Adds a mask to a block's inputs, (1, 1, S, S), False where an image query meets a text key."""
    arguments = inspect.signature(block.forward).bind(*inputs, **named).arguments
    image, text = arguments["hidden_states"], arguments["encoder_hidden_states"]
    num_text = text.shape[1]
    num_tokens = num_text + image.shape[1]
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=image.device)
    mask[..., num_text:, :num_text] = False
    settings = arguments.get("joint_attention_kwargs") or {}
    return (), arguments | {"joint_attention_kwargs": settings | {"attention_mask": mask}}


def _all_blocks(transformer: Any) -> list[Any]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


register_model("FluxTransformer2DModel", FluxAdapter())
