"""Bundles of published sizes with random weights, written block by block: the whole model is never in memory.

python -m benchmarks.synthetic sana-0.6b int8 /tmp/bundle
"""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from export import lower, quantize, weights, workspace
from export.block_programs import BlockKind, LossHead, Method, block_methods, example_tensors, loss_method
from export.bundle import assemble_bundle
from host.exporter import program_kinds
from host.frozen_base import per_block_name
from host.model_costs import ModelCosts
from runtime import manifest
from runtime.sample_store import SampleIdentity, SampleStoreWriter

SANA: dict[str, Any] = {
    "_class_name": "SanaTransformer2DModel",
    "in_channels": 32,
    "out_channels": 32,
    "patch_size": 1,
    "sample_size": 16,
    "caption_channels": 2304,
    "interpolation_scale": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained: a configuration, the cut, and the shape of a sample."""

    config: dict[str, Any]
    cut: tuple[int, int]
    prompt_tokens: int
    latent_factor: int
    patch_side: int = 256

    def costs(self) -> ModelCosts:
        """Shapes of everything, on the meta device."""
        return ModelCosts(
            self.config,
            self.patch_side,
            prompt_tokens=self.prompt_tokens,
            latent_factor=self.latent_factor,
            lora_rank=4,
        )

    def middle(self, costs: ModelCosts) -> range:
        """The trained blocks."""
        return range(self.cut[0], len(costs.blocks) - self.cut[1])

    def middle_weights(self) -> list[torch.Tensor]:
        """The trained blocks' frozen weights, on the meta device."""
        costs = self.costs()
        return [value for i in self.middle(costs) for value in costs.weights_of(i).values()]


SANA_06B = SANA | {
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
    "num_layers": 28,
}
WORKS = {
    "sana-0.6b": Work(config=SANA_06B, cut=(7, 7), prompt_tokens=300, latent_factor=32),
    "sana-1.6b": Work(config=SANA | {"num_layers": 20}, cut=(5, 5), prompt_tokens=300, latent_factor=32),
    "flux.1-dev": Work(
        config={"_class_name": "FluxTransformer2DModel", "guidance_embeds": True},
        cut=(19, 10),
        prompt_tokens=128,
        latent_factor=8,
    ),
}


def random_like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers that keep activations near one: a matrix over the root of its columns, the rest small."""
    size = value.shape[-1] ** -0.5 if value.ndim == 2 else 0.1
    return torch.randn(value.shape, generator=generator) * size


def block_kinds(work: Work, costs: ModelCosts) -> dict[int, str]:
    """The name of each trained block's program."""
    return program_kinds({i: (costs.blocks[i].kind, costs.layers[i]) for i in work.middle(costs)})


def make_methods(work: Work, costs: ModelCosts, weight_format: manifest.WeightFormat) -> dict[str, Method]:
    """Exports each kind of trained block, and the loss; shapes are enough for that."""
    kinds = block_kinds(work, costs)
    methods: dict[str, Method] = {}
    for kind in dict.fromkeys(kinds.values()):
        i = next(i for i in kinds if kinds[i] == kind)
        lora = weights.initial_lora(costs.weights_of(i), costs.layers[i], costs.rank, torch.Generator())
        example = BlockKind(
            name=kind,
            function=costs.adapter.block_function(costs.transformer, costs.blocks[i].kind, costs.grid),
            conditioning=example_tensors(costs.inputs[i]),
            weights=example_tensors(quantize.stored(costs.weights_of(i), weight_format)),
            lora=lora,
            **example_tensors({"hidden": costs.hidden[0]}),
        )
        methods |= block_methods(example, 1.0)
    head = LossHead(
        function=costs.adapter.predict_function(costs.transformer),
        conditioning=example_tensors({name: costs.conditioning[name][0] for name in costs.adapter.predict_inputs}),
        weights=example_tensors(costs.adapter.predict_weights(costs.transformer)),
        **example_tensors(costs.ends()),
    )
    return methods | loss_method(head)


def make_bundle(
    work: Work, weight_format: manifest.WeightFormat, folder: Path, samples: int = 4
) -> manifest.BundleManifest:
    """Writes a bundle that trains as a real one does; only its numbers mean nothing."""
    costs, generator = work.costs(), torch.Generator().manual_seed(0)
    kinds, middle = block_kinds(work, costs), work.middle(costs)
    parts_dir = folder.with_name(f".{folder.name}.parts")
    parts_dir.mkdir(parents=True, exist_ok=True)
    init: dict[str, torch.Tensor] = {}
    for i in middle:
        lora = weights.initial_lora(costs.weights_of(i), costs.layers[i], costs.rank, generator)
        init |= {f"{costs.blocks[i].module}.{name}.weight": value for name, value in lora.items()}
        block = {name: random_like(value, generator) for name, value in costs.weights_of(i).items()}
        stored = quantize.stored(block, weight_format)
        (parts_dir / weights.block_file(i)).parent.mkdir(exist_ok=True)
        weights.save_weights(parts_dir / weights.block_file(i), stored)
    output = {n: random_like(v, generator) for n, v in costs.adapter.predict_weights(costs.transformer).items()}
    weights.save_weights(parts_dir / weights.LOSS_FILE, output)
    weights.save_weights(parts_dir / weights.LORA_FILE, init)
    spec = lower.lower(make_methods(work, costs, weight_format), parts_dir / lower.FILE_NAME, "xnnpack")
    measured = workspace.measure(parts_dir / lower.FILE_NAME, spec)
    own = costs.adapter.per_block_inputs
    tensors = costs.ends() | {name: costs.conditioning[name][0] for name in costs.adapter.predict_inputs}
    for i in middle:
        tensors |= {per_block_name(i, n) if n in own else n: value for n, value in costs.inputs[i].items()}
    _write_samples(parts_dir / "samples.safetensors", tensors, costs.adapter.prompt_inputs, samples, generator)
    described = manifest.BundleManifest(
        schema=manifest.SCHEMA,
        created_by="benchmarks.synthetic",
        base=manifest.BaseSpec(family=costs.adapter.family, model="random", sha256="", num_blocks=len(costs.blocks)),
        cut=manifest.CutSpec(head=work.cut[0], tail=work.cut[1]),
        blocks=tuple(
            manifest.BlockSpec(
                index=i,
                kind=kinds[i],
                module=costs.blocks[i].module,
                file=weights.block_file(i),
                inputs={name: per_block_name(i, name) for name in costs.inputs[i] if name in own},
            )
            for i in middle
        ),
        programs=replace(spec, workspace_bytes=measured),
        weights=weight_format,
        loss_file=weights.LOSS_FILE,
        lora=manifest.LoraSpec(
            rank=4, alpha=4.0, targets=costs.targets, prefix="transformer", init_file=weights.LORA_FILE
        ),
        samples=manifest.SampleSpec(shards=("samples.safetensors",), count=samples, dtype="bf16"),
        training=manifest.TrainingSpec(steps=3, accumulation=1, checkpoint_every=1000),
        subject=manifest.SubjectSpec(instance_prompt="", photos=()),
    )
    parts = {str(path.relative_to(parts_dir)): path for path in sorted(parts_dir.rglob("*")) if path.is_file()}
    written, _ = assemble_bundle(folder, parts, described, lambda path: None)
    shutil.rmtree(parts_dir)
    return written


def kept_bundle(name: str, weight_format: manifest.WeightFormat, work_dir: Path) -> Path:
    """The bundle of one of `WORKS` in a folder that keeps them, made unless it is there."""
    folder = work_dir / f"{name}-{weight_format}"
    if not (folder / "manifest.json").is_file():
        make_bundle(WORKS[name], weight_format, folder)
    return folder


def _write_samples(
    path: Path, tensors: dict[str, torch.Tensor], prompt_inputs: tuple[str, ...], count: int, generator: torch.Generator
) -> None:
    identities = [
        SampleIdentity(
            index=i, photo="", photo_sha256="", crop=(0, 0, 0, 0), prompt="", sigma=0.5, timestep=500.0, seed=i
        )
        for i in range(count)
    ]
    prompts = {n: torch.randn(1, *tensors[n].shape, generator=generator) for n in prompt_inputs if n in tensors}
    own = {name: value for name, value in tensors.items() if name not in prompts}
    specs = {name: (torch.float32, tuple(value.shape)) for name, value in own.items()}
    with SampleStoreWriter(path, identities, [0] * count, specs, prompts) as writer:
        for i in range(count):
            writer.write(i, {n: torch.randn(v.shape, generator=generator) * 0.5 for n, v in own.items()}, 1.0)


if __name__ == "__main__":
    made = make_bundle(WORKS[sys.argv[1]], sys.argv[2], Path(sys.argv[3]))  # type: ignore[arg-type]
    print(f"{sys.argv[3]}: {len(made.blocks)} blocks, {sum(file.bytes for file in made.files.values()) / 1e6:.1f} MB")
