"""What a transformer costs to train on pictures of one side, counted on the meta device.

**Phone rows.** Private memory is what `runtime.trainer.planned_private_bytes` adds up for one sample at a time: the workspace
and arenas of the programs, one state (S, D) per middle block and three more, the LoRA with its gradient and AdamW's two
moments, one record. The workspace is laid out as XNNPACK's planner does, on the exported graph (`export.workspace.predict`).

**GPU rows.** The peak of autograd without checkpointing: see host/plan.py, which holds it against the paper's measurements.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from export import quantize, workspace
from export.block_programs import BlockKind, LossHead, block_traceables, example_tensors, flops, loss_traceable
from export.weights import initial_lora, lora_candidates, lora_layers
from host.frozen_base import per_block_name
from host.models import ModelAdapter, PromptStates
from host.models.base import adapter_of
from host.models.folder import skeleton_of
from host.residuals import STORED_DTYPES, stored_dtype
from runtime.manifest import WeightFormat
from runtime.memory import MIB

GIB = 1024**3
WEIGHTS = ("fp32", "fp16", "bf16", "int8", "int4")
"""Stored types of the weights on flash, from the most exact to the least."""
RUNTIME_BYTES = MIB
"""What a run takes besides: loaded programs, the step log, the allocator's slack (measured: half to one and a half)."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ADAM_BYTES = 16
"""A trained float32 parameter, its gradient and two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One way to train, and its cost. Bytes are bytes; a step is `accumulation` samples."""

    method: str
    weights: str
    """Type the base's weights are kept in."""
    cut: tuple[int, int]
    side: int
    """Side of the pictures trained on, pixels."""
    trained_parameters: int
    shipped_parameters: int
    """Frozen parameters training needs: those of the bundle on the phone, those in memory on a GPU."""
    private_bytes: int
    """Peak memory beyond the idle process."""
    weight_bytes: int
    """Weights on flash."""
    sample_bytes: int
    """Sample store on flash."""
    streamed_bytes_per_step: int
    """Read from flash: for each sample its record and, forward and backward, the weights. 0 where they are resident."""
    tflops_per_step: float
    """Products and convolutions, a multiply-add as two, recomputation included."""
    notes: str
    """What the memory is made of."""


class ModelCosts:
    """A transformer on the meta device that trains on pictures of one side."""

    def __init__(
        self,
        config: Mapping[str, Any],
        side: int,
        *,
        prompt_tokens: int,
        latent_factor: int,
        lora_rank: int = 4,
        lora_targets: str | tuple[str, ...] = ATTENTION,
        samples: int = 256,
        sample_dtype: str = "bf16",
        accumulation: int = 4,
    ) -> None:
        self.adapter, self.side, self.rank, self.targets = adapter_for(config), side, lora_rank, lora_targets
        self.samples, self.sample_dtype, self.accumulation = samples, sample_dtype, accumulation
        self.transformer, self.half = skeleton_of(config), nn.Module.to(skeleton_of(config), torch.bfloat16)
        names = self.adapter.normalized_config(self.transformer.config)
        token_side = latent_factor * names.patch_size
        if side < token_side or side % token_side:
            raise ValueError(f"side: got {side}, expected a multiple of {token_side} (autoencoder x patch) pixels.")
        if sample_dtype not in STORED_DTYPES:
            raise ValueError(f"sample_dtype: got {sample_dtype!r}, expected one of {', '.join(STORED_DTYPES)}.")
        self.grid = (side // token_side,) * 2
        self.num_image = self.grid[0] ** 2
        latents = torch.empty(1, names.num_channels, *(side // latent_factor,) * 2, device="meta")
        complete = self.transformer.config
        width = complete.get("caption_channels") or complete["joint_attention_dim"]
        pooled = complete.get("pooled_projection_dim")

        def embed(transformer: Any, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.device("meta"), torch.no_grad():
                states = torch.empty(1, prompt_tokens, width, dtype=dtype)
                mask = torch.ones(1, prompt_tokens, dtype=torch.int64)
                prompts = PromptStates(states, mask, torch.empty(1, pooled, dtype=dtype) if pooled else None)
                return self.adapter.embed(transformer, latents.to(dtype), torch.empty(1), prompts, guidance=1.0)

        self.hidden, self.conditioning = embed(self.transformer, torch.float32)
        self.half_hidden, self.half_conditioning = embed(self.half, torch.bfloat16)
        self.target = self.adapter.target_tokens(self.transformer, latents)
        self.blocks = self.adapter.blocks(self.transformer)
        modules = [self.transformer.get_submodule(ref.module) for ref in self.blocks]
        self.sizes = [num_parameters(module) for module in modules]
        self.rest = num_parameters(self.transformer) - sum(self.sizes)
        self.layers = [
            lora_layers(module, ref.module, lora_targets) for module, ref in zip(modules, self.blocks, strict=True)
        ]
        if not any(self.layers):
            known = sorted({name for module in modules for name in lora_candidates(module)})
            raise ValueError(f"LoRA targets {lora_targets!r} match no layer; the layers are {', '.join(known)}.")
        with torch.no_grad():
            per_block = [
                self.adapter.block_inputs(self.transformer, i, self.conditioning, layers)
                for i, layers in enumerate(self.layers)
            ]
        self.inputs = [{name: value[0] for name, value in inputs.items()} for inputs in per_block]
        self._costs: dict[Any, Any] = {}

    def phone_row(self, cut: tuple[int, int], dtype: str) -> PlanRow:
        """Blocks streamed from flash, one at a time."""
        if dtype not in WEIGHTS:
            raise ValueError(f"weights: got {dtype!r}, expected one of {', '.join(WEIGHTS)}.")
        middle = self._middle(cut)
        programs = {self._kind(i): self._once(self._programs, i, dtype) for i in middle}
        output = {name: tuple(value.shape) for name, value in self.adapter.predict_weights(self.transformer).items()}
        shipped = [*(self._once(self._shapes, i) for i in middle), output]
        trained = sum(self._once(self._lora_size, i) for i in middle)
        state = 4 * self.hidden[0].numel()
        records = [*self._stored_inputs(middle).values(), self.ends()["tail_residual"], self.ends()["target"]]
        parts = {
            # One workspace serves all methods; what they give out lies in arenas of their own.
            "workspace": max(self._once(self._loss_workspace, 0), *(size for size, _, _ in programs.values())),
            "arenas": sum(2 * state + cast_bytes for _, cast_bytes, _ in programs.values())
            + sum(4 * self._once(self._lora_size, i) for i in {self._kind(i): i for i in middle}.values()),
            "runtime": RUNTIME_BYTES,
            "block inputs": state * (len(middle) + 3),
            "LoRA": ADAM_BYTES * trained,
            "sample": 4 * sum(value.numel() for value in records),
        }
        block_bytes = sum(self._once(self._stored_bytes, i, dtype) for i in middle)
        record, prompt = self._record_bytes(middle)
        return PlanRow(
            method="phone: streamed",
            weights=dtype,
            cut=cut,
            side=self.side,
            trained_parameters=trained,
            shipped_parameters=sum(math.prod(shape) for shapes in shipped for shape in shapes.values()),
            private_bytes=sum(parts.values()),
            weight_bytes=block_bytes + sum(4 * math.prod(shape) for shape in output.values()),
            sample_bytes=self.samples * record + prompt,
            streamed_bytes_per_step=self.accumulation * (2 * block_bytes + record + prompt),
            tflops_per_step=self.accumulation * sum(programs[self._kind(i)][2] for i in middle) / 1e12,
            notes=", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in parts.items()),
        )

    def gpu_row(self, method: str, cut: tuple[int, int]) -> PlanRow:
        """Blocks resident in bf16, activations saved for autograd."""
        middle = self._middle(cut)
        resident = self.rest + sum(self.sizes[i] for i in middle)
        trained = sum(self._once(self._lora_size, i) for i in middle)
        saved, operations = (sum(self._once(self._autograd, i)[j] for i in middle) for j in (0, 1))
        parts = {"weights": 2 * resident, "LoRA": ADAM_BYTES * trained, "activations": saved}
        record, prompt = self._record_bytes(middle) if sum(cut) else (0, 0)
        return PlanRow(
            method=method,
            weights="bf16",
            cut=cut,
            side=self.side,
            trained_parameters=trained,
            shipped_parameters=resident,
            private_bytes=sum(parts.values()),
            weight_bytes=2 * resident,
            sample_bytes=self.samples * record + prompt,
            streamed_bytes_per_step=0,
            tflops_per_step=self.accumulation * operations / 1e12,
            notes=", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items()),
        )

    def _middle(self, cut: tuple[int, int]) -> range:
        if min(cut) < 0 or sum(cut) >= len(self.blocks):
            raise ValueError(f"cut {cut[0]},{cut[1]} leaves nothing to train: the model has {len(self.blocks)} blocks.")
        return range(cut[0], len(self.blocks) - cut[1])

    def _kind(self, index: int) -> tuple[str, tuple[str, ...]]:
        """Blocks of one kind with LoRA on the same layers cost the same."""
        return self.blocks[index].kind, self.layers[index]

    def _once(self, compute: Callable[..., Any], index: int, *arguments: Any) -> Any:
        key = (compute.__name__, self._kind(index), *arguments)
        if key not in self._costs:
            self._costs[key] = compute(index, *arguments)
        return self._costs[key]

    def weights_of(self, index: int) -> dict[str, Tensor]:
        """What the program of a block takes, before it is stored in a narrower type."""
        return self.adapter.block_weights(self.transformer, index, self.layers[index])

    def _stored_bytes(self, index: int, weights: WeightFormat) -> int:
        return sum(value.nbytes for value in quantize.stored(self.weights_of(index), weights).values())

    def _shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.weights_of(index).items()}

    def _lora(self, index: int) -> dict[str, Tensor]:
        return initial_lora(self.weights_of(index), self.layers[index], self.rank, torch.Generator())

    def _lora_size(self, index: int) -> int:
        return sum(value.numel() for value in self._lora(index).values())

    def _stored_inputs(self, middle: Iterable[int]) -> dict[str, Tensor]:
        """Conditioning of the blocks by its name in the sample store."""
        own = self.adapter.per_block_inputs
        return {per_block_name(i, n) if n in own else n: value for i in middle for n, value in self.inputs[i].items()}

    def _record_bytes(self, middle: Iterable[int]) -> tuple[int, int]:
        """Of a sample, and of a prompt; see host/residuals.py and runtime/sample_store.py."""
        tensors = self.ends() | {n: self.conditioning[n] for n in self.adapter.predict_inputs}
        tensors |= self._stored_inputs(middle)
        prompt = sum(4 * tensors.pop(name).numel() for name in self.adapter.prompt_inputs)
        types = {name: stored_dtype(name, self.sample_dtype) for name in tensors}
        scales = sum(4 * tensors[name].shape[0] for name, dtype in types.items() if dtype == torch.int8)
        return scales + sum(value.numel() * types[name].itemsize for name, value in tensors.items()), prompt

    def ends(self) -> dict[str, Tensor]:
        """(S, D), (T, D) and (T, P)."""
        hidden = self.hidden[0]
        return {"hidden": hidden, "tail_residual": hidden[-self.num_image :], "target": self.target[0]}

    def _programs(self, index: int, weights: WeightFormat) -> tuple[int, int, int]:
        """Of a block's two programs: the workspace, what both cast outside it, bytes, and the operations."""
        kind = BlockKind(
            name="block",
            function=self.adapter.block_function(self.transformer, self.blocks[index].kind, self.grid),
            conditioning=example_tensors(self.inputs[index]),
            weights=example_tensors(quantize.stored(self.weights_of(index), weights)),
            lora=example_tensors(self._lora(index)),
            **example_tensors({"hidden": self.hidden[0]}),
        )
        graphs = [method.graph() for method in block_traceables(kind, 1.0).values()]
        size, cast_bytes = max(map(workspace.predict, graphs)), sum(map(workspace.cast_bytes, graphs))
        return size, cast_bytes, sum(map(flops, graphs))

    def _loss_workspace(self, _: int) -> int:
        head = LossHead(
            function=self.adapter.predict_function(self.transformer),
            conditioning=example_tensors({name: self.conditioning[name][0] for name in self.adapter.predict_inputs}),
            weights=example_tensors(self.adapter.predict_weights(self.transformer)),
            **example_tensors(self.ends()),
        )
        return workspace.predict(loss_traceable(head).graph())

    def _autograd(self, index: int) -> tuple[int, int]:
        """Bytes autograd keeps of a block between its forward and its backward pass, and the operations of both."""
        block = self.half.get_submodule(self.blocks[index].module)
        for name, norm in [(n, m) for n, m in block.named_modules() if isinstance(m, nn.RMSNorm)]:
            block.set_submodule(name, RMSNorm(norm.normalized_shape[0], eps=1e-6).to("meta", torch.bfloat16))
        block.requires_grad_(False)
        if self.layers[index]:
            lora = peft.LoraConfig(r=self.rank, target_modules=list(self.layers[index]), init_lora_weights=False)
            with torch.device("meta"):
                peft.inject_adapter_in_model(lora, block)
        for name, parameter in block.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
        frozen = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
        storages = {}

        def save(value: Tensor) -> Tensor:
            storages[value.untyped_storage()._cdata] = value.untyped_storage()
            return value

        hidden = self.half_hidden.detach().requires_grad_(True)
        keep = torch.autograd.graph.saved_tensors_hooks(save, lambda value: value)
        with FlopCounterMode(display=False) as counter, keep, _Autocast():
            output = self.adapter.run_block(self.half, index, hidden, self.half_conditioning, self.grid)
            output.backward(torch.empty_like(output))
        saved = sum(storage.nbytes() for key, storage in storages.items() if key not in frozen)
        return saved, counter.get_total_flops()


class _Autocast(TorchFunctionMode):
    """CUDA's autocast to bf16 on the meta device, which has none, for the operations that transformers use, after the lists
    in PyTorch's documentation (docs.pytorch.org/docs/stable/amp.html); attention goes to the memory-efficient kernel."""

    LOW = (
        F.linear,
        torch.conv2d,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.bmm,
        F.scaled_dot_product_attention,
    )
    HIGH = (F.layer_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.sum, Tensor.sum)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = torch.bfloat16 if func in self.LOW else torch.float32 if func in self.HIGH else None
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, lambda value: value.to(dtype), (args, kwargs))
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            query, key, mask = given["query"], given["key"], given.get("attn_mask")
            bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            return kernel(query, key, given["value"], bias, True)[0]
        return func(*args, **kwargs)


def adapter_for(config: Mapping[str, Any]) -> ModelAdapter:
    """The adapter of a transformer's configuration."""
    return adapter_of(config.get("_class_name"), "The configuration")


def num_parameters(module: nn.Module) -> int:
    """Of a module and all in it."""
    return sum(parameter.numel() for parameter in module.parameters())
