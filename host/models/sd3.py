"""The Stable Diffusion 3 family, `SD3Transformer2DModel`: joint blocks whose state is prompt tokens, then image tokens.

The last block leaves the prompt as it is. Shape suffixes as in export/ops.py."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import diffusers
import torch
from torch import Tensor

from export import ops
from export.block_programs import BlockFunction, Tensors
from export.ops import FrozenLinears
from host.models import base, joint

MAX_PROMPT_TOKENS = 256
NORMS = ("norm1.linear", "norm1_context.linear")


class SD3Adapter:
    """See `ModelAdapter`."""

    family = "sd3"
    pipeline: Any = diffusers.StableDiffusion3Pipeline
    normalized_config = base.TransformerConfig
    lora_prefix = "transformer"
    prompt_inputs: tuple[str, ...] = ()
    per_block_inputs: tuple[str, ...] = (joint.ROWS,)
    predict_inputs: tuple[str, ...] = (joint.OUTPUT_ROWS,)

    def takes_negative(self, config: base.TransformerConfig) -> bool:
        return True

    def encode_prompts(self, load: Callable[[str], Any], request: base.PromptRequest) -> base.PromptStates:
        clip, t5 = load("tokenizer"), load("tokenizer_3")
        max_tokens = min(request.max_tokens or MAX_PROMPT_TOKENS, t5.model_max_length)
        base.require_short(t5, request.texts, max_tokens)
        base.warn_where_cut(clip, request.texts)
        mask = torch.ones(len(request.texts), clip.model_max_length + max_tokens, dtype=torch.int64)
        if request.blank:
            return joint.blank_prompts(request.config, mask)
        pairs = [
            base.bare_pipeline(
                self.pipeline, tokenizer=load(f"tokenizer{n}"), text_encoder=load(f"text_encoder{n}")
            )._get_clip_prompt_embeds(request.texts, device="cpu")
            for n in ("", "_2")
        ]
        t5_states = base.bare_pipeline(
            self.pipeline, tokenizer_3=t5, text_encoder_3=load("text_encoder_3")
        )._get_t5_prompt_embeds(request.texts, max_sequence_length=max_tokens, device="cpu", dtype=torch.float32)
        clip_states = torch.cat([states for states, _ in pairs], -1)
        clip_states = torch.nn.functional.pad(clip_states, (0, t5_states.shape[-1] - clip_states.shape[-1]))
        states = torch.cat([clip_states, t5_states], 1)
        return base.PromptStates(states.float(), mask, torch.cat([pooled for _, pooled in pairs], -1).float())

    def embed(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: base.PromptStates, guidance: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if transformer.config.dual_attention_layers:
            raise ValueError("SD3 transformers with dual attention layers (SD3.5 medium) are not supported.")
        embedded_BD = transformer.time_text_embed(timesteps, prompts.pooled)
        hidden_BSD = torch.cat([transformer.context_embedder(prompts.states), transformer.pos_embed(latents)], 1)
        output_modulation = joint.output_rows(transformer.norm_out, embedded_BD)
        return hidden_BSD, {joint.EMBEDDING: embedded_BD, joint.OUTPUT_ROWS: output_modulation}

    def run_block(
        self, transformer: Any, index: int, hidden: Tensor, conditioning: Tensors, grid: tuple[int, int]
    ) -> Tensor:
        block = transformer.transformer_blocks[index]
        return joint.run_block(block, hidden, grid, conditioning[joint.EMBEDDING])

    def blocks(self, transformer: Any) -> list[base.BlockRef]:
        return [
            base.BlockRef("sd3_last" if block.context_pre_only else "sd3_joint", f"transformer_blocks.{i}")
            for i, block in enumerate(transformer.transformer_blocks)
        ]

    def mask_text(self, transformer: Any, blocks: Iterable[int]) -> AbstractContextManager[None]:
        return base.swapped_processors((transformer.transformer_blocks[index].attn for index in blocks), _image_apart)

    def block_inputs(
        self, transformer: Any, index: int, conditioning: Tensors, layers: Sequence[str]
    ) -> dict[str, Tensor]:
        return joint.inputs(transformer.transformer_blocks[index], NORMS, conditioning[joint.EMBEDDING], layers)

    def block_weights(self, transformer: Any, index: int, layers: Sequence[str]) -> dict[str, Tensor]:
        return joint.weights(transformer.transformer_blocks[index], NORMS, layers)

    def block_function(self, transformer: Any, kind: str, grid: tuple[int, int]) -> BlockFunction:
        heads, num_image, is_last = transformer.config.num_attention_heads, grid[0] * grid[1], kind == "sd3_last"

        def block(hidden_SD: Tensor, conditioning: Tensors, weights: Tensors, linear: FrozenLinears) -> Tensor:
            rows, num_text = joint.rows(conditioning, linear, NORMS), hidden_SD.shape[0] - num_image
            text_LD, image_TD = ops.split(hidden_SD, num_text)
            # The last block's context norm makes scale before shift.
            text_shift, text_scale = (rows[7], rows[6]) if is_last else (rows[6], rows[7])
            y_LD = ops.modulate(ops.layer_norm(text_LD, joint.EPSILON), text_shift, text_scale)
            x_TD = ops.modulate(ops.layer_norm(image_TD, joint.EPSILON), rows[0], rows[1])

            def heads_of(layer: str, x: Tensor, norm: str) -> Tensor:
                x_HSK, weight = ops.split_heads(linear(f"attn.{layer}", x), heads), weights.get(f"attn.{norm}.weight")
                return x_HSK if weight is None else ops.rms_norm(x_HSK, weight, joint.EPSILON)

            query_HSK, key_HSK, value_HSK = (
                torch.cat(
                    [heads_of(f"add_{n}_proj", y_LD, f"norm_added_{n}"), heads_of(f"to_{n}", x_TD, f"norm_{n}")], 1
                )
                for n in "qkv"
            )
            text_attended, image_attended = ops.split(ops.softmax_attention(query_HSK, key_HSK, value_HSK), num_text)

            image_TD = joint.end_of_stream(image_TD, image_attended, "attn.to_out.0", "ff", rows[2:6], linear)
            if not is_last:
                text_LD = joint.end_of_stream(
                    text_LD, text_attended, "attn.to_add_out", "ff_context", rows[8:12], linear
                )
            return torch.cat([text_LD, image_TD])

        return block

    run_output = staticmethod(joint.run_output)
    predict_weights = staticmethod(joint.predict_weights)
    predict_function = staticmethod(joint.predict_function)

    def target_tokens(self, transformer: Any, velocity: Tensor) -> Tensor:
        return base.tile_tokens(velocity, transformer.config.patch_size)

    def sample(
        self,
        run: base.Sampler,
        prompts: base.PromptStates,
        negative: base.PromptStates | None,
        latents: Tensor,
        steps: int,
    ) -> Tensor:
        assert negative is not None
        return run(
            latents=latents,
            height=latents.shape[2] * 8,
            width=latents.shape[3] * 8,
            prompt_embeds=prompts.states,
            pooled_prompt_embeds=prompts.pooled,
            negative_prompt_embeds=negative.states,
            negative_pooled_prompt_embeds=negative.pooled,
        )


def _image_apart(processor: Any) -> Any:
    """The same attention, but the image tokens see image tokens alone: without positions that is attention of their own."""

    def attend(
        attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        _, text = processor(attn, hidden_states, encoder_hidden_states=encoder_hidden_states, **settings)
        return processor(attn, hidden_states, **settings), text

    return attend


base.register_model("SD3Transformer2DModel", SD3Adapter())
