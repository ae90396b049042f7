"""The export: photos, model, prompt and cut to a bundle, each stage cached. Where the pieces of the workstation meet.

Reads photos and a model, writes a bundle folder. One command: `pocketdit export PHOTOS -o BUNDLE`.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from optimum.utils import DummyVisionInputGenerator
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from export import block_programs, lower, ops, quantize, weights, workspace
from export.bundle import assemble_bundle, require_replaceable
from export.parity import Parity, check_parity
from host import frozen_base, patches, residuals, schedule
from host.block_profile import architecture_of
from host.cache import cached_stage, is_whole, new_stage, stage_folder, stage_key
from host.config import Config, ExportConfig
from host.cut import resolve_cut
from host.models import ModelFolder, PromptStates
from host.photos import Photo, load_photos
from runtime import __version__, manifest
from runtime.bundle import sha256_file
from runtime.sample_store import SCHEMA as SAMPLES_SCHEMA
from runtime.sample_store import SampleStore
from runtime.schema import encode

PREVIEW_SIDE = 320
CROPS_PREVIEW = "preview/crops.png"
MODEL_EFFICIENCY = 0.5
"""Rate of the base's blocks over that of a large product, for the time estimate."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """What an export will do, known before anything long starts."""

    model: str
    family: str
    photos: tuple[str, ...]
    cut: tuple[int, int]
    num_blocks: int
    patch_side: int
    image_side: int
    samples: int
    sample_bytes: int
    """Size of the sample store, bytes."""
    weight_bytes: int
    """Size of the middle blocks' weights as they are stored, bytes."""
    sample_tflops: float
    """Work of making the samples, multiply-adds as two."""
    sample_seconds: float
    """Estimated from that work and the rate of a product measured here and now, over all processes."""


class Exporter:
    """One export, from checked settings to a bundle."""

    def __init__(
        self, config: Config, photos_dir: Path, bundle_dir: Path, budget: manifest.BudgetSpec | None = None
    ) -> None:
        """Checks everything that can be checked without long work.

        Args:
            config: Settings of the export and of the training.
            photos_dir: Only read.
            bundle_dir: Made, or replaced if it holds a bundle.
            budget: What `host.budget` chose `config` for.

        Raises:
            ValueError: Photos, model, cut, sides or the target folder are unfit; nothing was written.
        """
        self.config, self.bundle_dir, self.budget = config, bundle_dir, budget
        settings = config.export
        require_replaceable(bundle_dir)
        self.model = ModelFolder(settings.model, settings.revision, settings.variant)
        self.skeleton: Any = self.model.skeleton()
        self.blocks = self.model.adapter.blocks(self.skeleton)
        self.cut, self.cut_origin = resolve_cut(
            settings.cut,
            settings.skip,
            model=settings.model,
            architecture=architecture_of(self.skeleton),
            transformer_sha256=lambda: self.model.sha256("transformer"),
            num_blocks=len(self.blocks),
        )
        if sum(self.cut) >= len(self.blocks):
            raise ValueError(
                f"cut {self.cut[0]},{self.cut[1]} leaves nothing to train: {settings.model} has {len(self.blocks)} blocks. "
                f"Skip at most {len(self.blocks) - 1}."
            )
        self._resolve_sides()
        self.model.require_whole()
        self.photos: list[Photo] = load_photos(
            photos_dir,
            min_side=self.image_side,
            instance_prompt=settings.prompt,
            background=settings.background,
            on_bad=settings.on_bad_photo,
        )
        self.middle = range(self.cut[0], len(self.blocks) - self.cut[1])
        layers = weights.choose_layers(
            {block.module: self.skeleton.get_submodule(block.module) for block in self.blocks},
            settings.lora_targets,
            [self.blocks[i].module for i in self.middle],
        )
        self.layers = dict(zip(self.middle, layers.values(), strict=True))
        for i in self.middle:
            weights.require_rank(self._block_weights(i), self.layers[i], settings.lora_rank)
        self.kinds = program_kinds({i: (self.blocks[i].kind, self.layers[i]) for i in self.middle})

    def _resolve_sides(self) -> None:
        settings = self.config.export
        config = self.model.normalized_config
        self.factor = self.model.latent_factor
        self.multiple = self.factor * config.patch_size
        self.image_side = config.image_size * self.factor if settings.image_side is None else settings.image_side
        full = settings.patch_policy == "full"
        self.patch_side = settings.patch_side if settings.patch_side is not None else self.image_side
        if settings.patch_side is None and not full:
            self.patch_side = patches.default_side(self.image_side, self.multiple)
        for name, side in (("image_side", self.image_side), ("patch_side", self.patch_side)):
            patches.require_side(name, side, self.multiple)
        if self.patch_side > self.image_side:
            raise ValueError(f"patch_side {self.patch_side} exceeds image_side {self.image_side}.")
        if full and self.patch_side != self.image_side:
            raise ValueError(
                f"patch_policy 'full' takes whole pictures: leave patch_side out, or set it to {self.image_side}."
            )
        num_processes = residuals.processes().num_processes
        if settings.samples < num_processes:
            raise ValueError(
                f"samples: got {settings.samples} for {num_processes} processes, expected at least one each."
            )

    def plan(self) -> ExportPlan:
        """Sizes and settings, from one sample run through the model's shapes."""
        out, flops_per_sample = self._counted_example
        flops = self.config.export.samples * flops_per_sample
        state = residuals.processes()
        rate = MODEL_EFFICIENCY * frozen_base.flops_per_second(state.device) * state.num_processes
        sample_bytes = self.config.export.samples * sum(
            math.prod(value.shape[1:]) * residuals.stored_dtype(name, self.config.export.sample_dtype).itemsize
            for name, value in frozen_base.sample_tensors(self.model, out).items()
            if name not in self.model.adapter.prompt_inputs
        )
        stored = (quantize.stored(self._block_weights(i), self.config.export.weights) for i in self.middle)
        weight_bytes = sum(value.nbytes for block in stored for value in block.values())
        return ExportPlan(
            model=self.model.name,
            family=self.model.adapter.family,
            photos=tuple(photo.name for photo in self.photos),
            cut=self.cut,
            num_blocks=len(self.blocks),
            patch_side=self.patch_side,
            image_side=self.image_side,
            samples=self.config.export.samples,
            sample_bytes=sample_bytes,
            weight_bytes=weight_bytes,
            sample_tflops=flops / 1e12,
            sample_seconds=flops / rate,
        )

    def run(
        self, on_stage: Callable[[str, bool, float], None]
    ) -> tuple[manifest.BundleManifest, dict[str, float], Parity] | None:
        """Makes the bundle. Under `accelerate launch` all processes make samples, the main one does the rest.

        Args:
            on_stage: Called after each stage with its name, whether it came from the cache, and its seconds.

        Returns:
            The manifest, the relative storing error per sample tensor, and the parity with the base model; None in
            the processes that are not the main one.
        """
        state = residuals.processes()
        base_hash = self.model.sha256()
        samples_dir = self._samples_stage(self._samples_key(base_hash), on_stage)
        if not state.is_main_process:
            return None
        weights_dir = self._stage("weights", self._weights_key(), self._make_weights, on_stage)
        programs_dir = self._stage("programs", self._programs_key(), self._make_programs, on_stage)
        start = time.perf_counter()
        shards = sorted(samples_dir.glob("samples-*.safetensors"))
        preview_dir = samples_dir / "preview"
        parts = {shard.name: shard for shard in shards}
        parts |= {f"preview/{path.name}": path for path in sorted(preview_dir.iterdir())}
        parts |= {str(path.relative_to(weights_dir)): path for path in sorted(weights_dir.rglob("*.safetensors"))}
        parts[lower.FILE_NAME] = programs_dir / lower.FILE_NAME
        described = self._manifest(base_hash, shards, programs_dir)
        written, parity = assemble_bundle(self.bundle_dir, parts, described, check_parity)
        on_stage("bundle", False, time.perf_counter() - start)
        return written, json.loads((samples_dir / "errors.json").read_text()), parity

    def _stage(
        self,
        name: str,
        key: dict[str, Any],
        build: Callable[[Path], None],
        on_stage: Callable[[str, bool, float], None],
    ) -> Path:
        start = time.perf_counter()
        folder, hit = cached_stage(name, key, build)
        on_stage(name, hit, time.perf_counter() - start)
        return folder

    def _samples_stage(self, key: dict[str, Any], on_stage: Callable[[str, bool, float], None]) -> Path:
        """The main process owns the stage's folder; every process writes its shard into it."""
        state, start = residuals.processes(), time.perf_counter()
        folder = stage_folder("samples", key)
        with ExitStack() as stack:
            shared: list[str | None] = [None]
            if state.is_main_process and not is_whole(folder):
                shared = [str(stack.enter_context(new_stage(folder)))]
            broadcast_object_list(shared)
            if shared[0] is not None:
                self._make_samples(Path(shared[0]))
                state.wait_for_everyone()
        on_stage("samples", shared[0] is None, time.perf_counter() - start)
        return folder

    def _samples_key(self, base_hash: str) -> dict[str, Any]:
        settings: dict[str, Any] = encode(self.config.export)
        programs_only = ("budget", "backend", "weights", "lora_rank", "lora_alpha", "lora_targets")
        for irrelevant in ("model", "skip", "batch_size", "on_bad_photo", *programs_only):
            del settings[irrelevant]
        tensors = frozen_base.sample_tensors(self.model, self._example)
        return settings | {
            "tensors": {name: list(value.shape[1:]) for name, value in tensors.items()},
            "schema": SAMPLES_SCHEMA,
            "model": base_hash,
            "sources": _source_hash(
                *(module.__file__ for module in (residuals, frozen_base, patches, schedule)),
                *self.model.adapter_files(),
            ),
            "photos": [[photo.name, photo.sha256, photo.caption] for photo in self.photos],
            "cut": list(self.cut),
            "sides": [self.patch_side, self.image_side, self.multiple],
            "processes": residuals.processes().num_processes,
            "version": __version__,
        }

    def sample_plan(self) -> residuals.SamplePlan:
        """Every random choice of the samples."""
        settings = self.config.export
        return residuals.plan_samples(
            self.photos,
            count=settings.samples,
            seed=settings.seed,
            side_min=self.patch_side,
            side_max=self.image_side,
            multiple=self.multiple,
            policy=settings.patch_policy,
            flip_probability=settings.flip_probability,
            distribution=settings.sigma_distribution,
            shift=settings.sigma_shift,
        )

    def _make_samples(self, folder: Path) -> None:
        settings, state = self.config.export, residuals.processes()
        plan = self.sample_plan()
        prompts = self.model.encode_prompts(plan.prompts, max_tokens=settings.prompt_tokens)
        rows = range(state.process_index, settings.samples, state.num_processes)
        latents = residuals.encode_patches(
            self.model, self.photos, plan, rows, self.patch_side, self.image_side, settings.batch_size
        )
        shard = f"samples-{state.process_index:05d}-of-{state.num_processes:05d}.safetensors"
        errors = residuals.make_samples(
            self.model,
            plan,
            latents,
            rows,
            prompts,
            layers=self.layers,
            guidance=settings.guidance,
            dtype=settings.sample_dtype,
            batch=settings.batch_size,
            shard_path=folder / shard,
        )
        if state.is_main_process:
            (folder / "errors.json").write_text(json.dumps(errors))
            self._make_previews(folder / "preview", plan)

    def _make_previews(self, folder: Path, plan: residuals.SamplePlan) -> None:
        folder.mkdir()
        for number, photo in enumerate(self.photos):
            small = photo.image.copy()
            small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE), Image.Resampling.LANCZOS)
            small.save(folder / preview_name(number), quality=92)
        first = self.photos[0]
        crops = [
            (patches.CropBox(i.crop[0], i.crop[1], i.crop[2], bool(i.crop[3])), i.sigma)
            for i, photo in zip(plan.identities, plan.photo_index, strict=True)
            if photo == 0
        ]
        prepared = patches.prepare(first.image, self.image_side)
        patches.crops_figure(prepared, crops, self.patch_side).save(folder / Path(CROPS_PREVIEW).name)

    def _weights_key(self) -> dict[str, Any]:
        settings = self.config.export
        return {
            "schema": manifest.SCHEMA,
            "transformer": self.model.sha256("transformer"),
            "cut": list(self.cut),
            "rank": settings.lora_rank,
            "layers": {str(i): layers for i, layers in self.layers.items()},
            "seed": settings.seed,
            "format": settings.weights,
            "sources": _source_hash(weights.__file__, quantize.__file__, *self.model.adapter_files()),
        }

    def _make_weights(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(self.config.export.seed)
        init: dict[str, torch.Tensor] = {}
        transformer = self.model.hollow()
        for index in self.middle:
            with self.model.block(transformer, index):
                block = self.model.adapter.block_weights(transformer, index, self.layers[index])
                path = folder / weights.block_file(index)
                weights.save_weights(path, quantize.stored(block, self.config.export.weights))
                lora = weights.initial_lora(block, self.layers[index], self.config.export.lora_rank, generator)
                del block  # or its weights would still be held while the next block's are loaded
            init |= {f"{self.blocks[index].module}.{name}.weight": value for name, value in lora.items()}
        output = quantize.stored(self.model.adapter.predict_weights(transformer), "fp32")
        weights.save_weights(folder / weights.LOSS_FILE, output)
        weights.save_weights(folder / weights.LORA_FILE, init)

    def _programs_key(self) -> dict[str, Any]:
        settings, example = self.config.export, self._example
        tensors = frozen_base.sample_tensors(self.model, example)
        return {
            "schema": manifest.SCHEMA,
            "family": self.model.adapter.family,
            "config": {
                n: value for n, value in self.model.config.items() if n not in ("num_layers", "num_single_layers")
            },
            "shapes": {name: list(value.shape[1:]) for name, value in tensors.items() if not name.startswith("block.")},
            "lora": [
                settings.lora_rank,
                settings.lora_alpha,
                {self.kinds[i]: self.layers[i] for i in self.middle},
            ],
            "backend": settings.backend,
            "weights": settings.weights,
            "torch": torch.__version__,
            "executorch": lower.VERSION,
            "sources": _source_hash(
                *(module.__file__ for module in (block_programs, lower, ops, quantize, workspace)),
                *self.model.adapter_files(),
            ),
        }

    def _make_programs(self, folder: Path) -> None:
        settings, adapter, example = self.config.export, self.model.adapter, self._example
        grid = frozen_base.token_grid(self.model, (self.patch_side // self.factor,) * 2)
        methods: dict[str, block_programs.Method] = {}
        for index in self.middle:
            if f"{self.kinds[index]}_forward" in methods:
                continue
            block = block_programs.example_tensors(self._block_weights(index))
            kind = block_programs.BlockKind(
                name=self.kinds[index],
                function=adapter.block_function(self.skeleton, self.blocks[index].kind, grid),
                hidden=block_programs.example_tensors({"hidden": example.hidden[0]})["hidden"],
                conditioning=block_programs.example_tensors(
                    {name: value[0] for name, value in example.block_inputs[index].items()}
                ),
                weights=block_programs.example_tensors(quantize.stored(self._block_weights(index), settings.weights)),
                lora=weights.initial_lora(block, self.layers[index], settings.lora_rank, torch.Generator()),
            )
            methods |= block_programs.block_methods(kind, settings.lora_alpha / settings.lora_rank)
        tensors = {"hidden": example.hidden[0], "tail_residual": example.tail_residual[0], "target": example.target[0]}
        methods |= block_programs.loss_method(
            block_programs.LossHead(
                function=adapter.predict_function(self.skeleton),
                conditioning=block_programs.example_tensors(
                    {name: value[0] for name, value in example.predict_inputs.items()}
                ),
                weights=block_programs.example_tensors(adapter.predict_weights(self.skeleton)),
                **block_programs.example_tensors(tensors),
            )
        )
        spec = lower.lower(methods, folder / lower.FILE_NAME, settings.backend)
        spec = replace(spec, workspace_bytes=workspace.measure(folder / lower.FILE_NAME, spec))
        (folder / "spec.json").write_text(json.dumps(encode(spec)))

    def _block_weights(self, index: int) -> dict[str, torch.Tensor]:
        """Shapes of what the program of a block takes, on the meta device."""
        return self.model.adapter.block_weights(self.skeleton, index, self.layers[index])

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt, where the family trims, else of every prompt."""
        return self._blank_prompts.states.shape[1]

    @cached_property
    def _blank_prompts(self) -> PromptStates:
        """The prompts' shapes and masks, from the tokenizers alone."""
        captions = sorted({photo.caption for photo in self.photos})
        return self.model.encode_prompts(captions, max_tokens=self.config.export.prompt_tokens, blank=True)

    @property
    def _example(self) -> frozen_base.BaseOutputs:
        """A sample of shapes without values."""
        return self._counted_example[0]

    @cached_property
    def _counted_example(self) -> tuple[frozen_base.BaseOutputs, int]:
        """A sample through the model on the meta device, which gives every shape and computes nothing; its operations."""
        side = self.patch_side // self.factor
        meta = torch.device("meta")
        prompts = self._blank_prompts
        pixels = DummyVisionInputGenerator("text-to-image", self.model.normalized_config, batch_size=1)
        pixels.height = pixels.width = side
        latents = pixels.generate("latent_sample").to(meta)
        patches = frozen_base.Patches(
            latents=latents, noise=latents, sigmas=torch.empty(1, device=meta), prompts=prompts[[0]].to(meta)
        )
        guidance = self.config.export.guidance
        with FlopCounterMode(display=False) as counter:
            (out,) = frozen_base.base_outputs(self.model, self.skeleton, [patches], self.layers, guidance)
        return out, counter.get_total_flops()

    def _own_inputs(self, index: int) -> list[str]:
        """Program inputs of a block that no other block shares."""
        return [name for name in self._example.block_inputs[index] if name in self.model.adapter.per_block_inputs]

    def _manifest(self, base_hash: str, shards: list[Path], programs_dir: Path) -> manifest.BundleManifest:
        settings: ExportConfig = self.config.export
        programs = manifest.decode(
            manifest.ProgramSpec, json.loads((programs_dir / "spec.json").read_text()), "spec.json"
        )
        SampleStore(shards)  # refuses gaps before the bundle is written
        return manifest.BundleManifest(
            schema=manifest.SCHEMA,
            created_by=f"pocketdit {__version__}",
            base=manifest.BaseSpec(
                family=self.model.adapter.family,
                model=self.model.name,
                revision=settings.revision,
                variant=settings.variant,
                sha256=base_hash,
                num_blocks=len(self.blocks),
            ),
            cut=manifest.CutSpec(head=self.cut[0], tail=self.cut[1]),
            blocks=tuple(
                manifest.BlockSpec(
                    index=i,
                    kind=self.kinds[i],
                    module=self.blocks[i].module,
                    file=weights.block_file(i),
                    inputs={name: frozen_base.per_block_name(i, name) for name in self._own_inputs(i)},
                )
                for i in self.middle
            ),
            programs=programs,
            weights=settings.weights,
            loss_file=weights.LOSS_FILE,
            lora=manifest.LoraSpec(
                rank=settings.lora_rank,
                alpha=settings.lora_alpha,
                targets=settings.lora_targets,
                prefix=self.model.adapter.lora_prefix,
                init_file=weights.LORA_FILE,
                convolutions=tuple(
                    name
                    for name in (f"{self.blocks[i].module}.{layer}" for i in self.middle for layer in self.layers[i])
                    if isinstance(self.skeleton.get_submodule(name), torch.nn.Conv2d)
                ),
            ),
            samples=manifest.SampleSpec(
                shards=tuple(shard.name for shard in shards), count=settings.samples, dtype=settings.sample_dtype
            ),
            training=self.config.train,
            subject=manifest.SubjectSpec(
                instance_prompt=settings.prompt or self.photos[0].caption,
                photos=tuple(
                    manifest.PhotoSpec(
                        name=photo.name,
                        sha256=photo.sha256,
                        caption=photo.caption,
                        preview=f"preview/{preview_name(number)}",
                    )
                    for number, photo in enumerate(self.photos)
                ),
            ),
            budget=self.budget,
            export=encode(settings)
            | {"patch_side": self.patch_side, "image_side": self.image_side, "cut": list(self.cut)}
            | {"prompt_length": self.prompt_length, "cut_origin": encode(self.cut_origin)},
        )


def program_kinds(blocks: Mapping[int, tuple[str, tuple[str, ...]]]) -> dict[int, str]:
    """The kind of program of each block, from its kind and its layers with LoRA: where these differ, programs do."""
    variants: dict[str, list[tuple[str, ...]]] = {}
    kinds = {}
    for index, (kind, layers) in blocks.items():
        known = variants.setdefault(kind, [])
        if layers not in known:
            known.append(layers)
        number = known.index(layers)
        kinds[index] = kind + (f"_{number + 1}" if number else "")
    return kinds


def preview_name(number: int) -> str:
    """File name of a photo's preview; photo names may hold anything, these are plain."""
    return f"photo-{number:03d}.jpg"


def _source_hash(*paths: str | None) -> str:
    return stage_key({str(number): sha256_file(Path(path)) for number, path in enumerate(paths) if path})
