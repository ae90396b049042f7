"""The settings of the workstation's commands: TOML in, flags override, unknown keys refused by name."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.errors import SchemaError
from runtime.manifest import TrainingSpec, WeightFormat
from runtime.schema import decode

PatchPolicy = Literal["low-to-high", "high-to-low", "random", "resize", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """What `export` does."""

    model: str = "tiny-base"
    """A folder in diffusers' layout, a hub id, or `tiny-base` for the embedded model."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    variant: str | None = None
    """Variant of the weight files, e.g. `fp16`, as for diffusers."""
    prompt: str | None = None
    """Instance prompt for photos without a caption of their own."""
    cut: str | tuple[int, int] | None = None
    """Blocks skipped at the head and at the tail; `auto` is what the model's profile says, `auto:FILE` what that one says; None
    skips half of `skip` at either end, or without it a quarter."""
    skip: float | None = None
    """Share of the blocks skipped where `cut` is no numbers; None is half for `auto`."""
    samples: int = 256
    """Size of the pool of patch samples; training goes through it again and again."""
    sample_dtype: Literal["bf16", "int8", "fp32"] = "bf16"
    """How block inputs and tail residuals are stored; int8 has one scale a token."""
    patch_policy: PatchPolicy = "low-to-high"
    """How the crop depends on the noise: `low-to-high` takes large crops at high noise; `full` never crops."""
    patch_side: int | None = None
    """Side of the patches trained on, pixels; None is half of `image_side`."""
    image_side: int | None = None
    """Photos are scaled so that their shorter side has this many pixels; None is the model's own size."""
    flip_probability: float = 0.0
    """Chance that a patch is mirrored; leave 0 for subjects with writing on them."""
    sigma_distribution: Literal["logit_normal", "uniform"] = "logit_normal"
    """How noise levels are drawn."""
    sigma_shift: float = 1.0
    """Shifts noise levels up, as large pictures need; 1 leaves them."""
    background: tuple[int, int, int] = (255, 255, 255)
    """What transparent photos are laid on, RGB."""
    on_bad_photo: Literal["fail", "skip"] = "fail"
    """Whether an unreadable photo stops the export or is left out, by name."""
    lora_rank: int = 4
    lora_alpha: float = 4.0
    """The adapter's strength is alpha / rank."""
    lora_targets: str | tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Layers of the middle blocks that get LoRA, as PEFT's `target_modules`: ends of names, or one regular expression for
    whole module paths, or `all-linear`."""
    prompt_tokens: int | None = None
    """Tokens of a prompt; None is what the model was trained with. Padding counts in FLUX (512), where fewer are faster."""
    guidance: float = 3.5
    """What guidance-distilled models (FLUX.1-dev, SANA-Sprint) are told during training; others ignore it."""
    weights: WeightFormat = "fp32"
    """How the bundle stores linear weights: fp32, int8 (a quarter of the bytes), int4 (an eighth), fp16, bf16. fp16 and bf16
    are widened outside XNNPACK, a whole block at a time, which takes as much private memory as the block in fp32."""
    budget: int | None = None
    """Most private memory training may hold beyond the idle process, MiB: cut and patch_side, where left open, are chosen so
    that it fits; `train` keeps to it."""
    backend: Literal["xnnpack", "portable"] = "xnnpack"
    """Kernels of the block programs."""
    batch_size: int = 8
    """Samples the workstation computes at a time."""
    seed: int = 0
    """Every random choice of the export follows from it."""

    def __post_init__(self) -> None:
        for name in ("samples", "lora_rank", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        _require_sides(image_side=self.image_side, patch_side=self.patch_side)
        for name in ("lora_alpha", "sigma_shift"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a positive number")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"flip_probability: got {self.flip_probability}, expected 0 to 1")
        if isinstance(self.cut, str) and self.cut != "auto" and not self.cut.startswith("auto:"):
            raise ValueError(f"cut: got {self.cut!r}, expected two numbers of blocks, auto, or auto:FILE")
        if self.skip is not None and not 0 <= self.skip < 1:
            raise ValueError(f"skip: got {self.skip}, expected 0 or more and less than 1")
        if isinstance(self.cut, tuple) and min(self.cut) < 0:
            raise ValueError(f"cut: got {self.cut}, expected two numbers of blocks, 0 or more")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens: got {self.prompt_tokens}, expected at least 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget: got {self.budget}, expected at least 1 MiB")
        if not self.lora_targets:
            raise ValueError("lora_targets: got none, expected at least one layer name")
        if any(not 0 <= channel <= 255 for channel in self.background):
            raise ValueError(f"background: got {self.background}, expected three numbers from 0 to 255")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What `generate` draws."""

    prompts: tuple[str, ...] = ()
    """None asks for the instance prompt."""
    seeds: tuple[int, ...] = (0, 1)
    """Each prompt is drawn with each seed, by the base and by the adapter from the same noise."""
    steps: int = 24
    """Denoising steps."""
    guidance: float = 3.0
    """Classifier-free guidance."""
    image_side: int | None = None
    """Side of the pictures, pixels; None is the model's own size."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, expected at least 1")
        if not self.seeds:
            raise ValueError("seeds: got none, expected at least one")
        _require_sides(image_side=self.image_side)


def _require_sides(**sides: int | None) -> None:
    for name, side in sides.items():
        if side is not None and side < 1:
            raise ValueError(f"{name}: got {side}, expected at least 1 pixel; leave it out for the default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One file for all stages; every command reads its own table."""

    export: ExportConfig = field(default_factory=ExportConfig)
    train: TrainingSpec = field(default_factory=TrainingSpec)
    generate: GenerateConfig = field(default_factory=GenerateConfig)


def read_tables(config_path: Path | None, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Reads a TOML file and lays `section.key=value` overrides on it, values in TOML syntax (a bare word is a string).

    Raises:
        SchemaError: The file is missing or no TOML, or an override has another form.
    """
    tables: dict[str, Any] = {}
    if config_path is not None:
        try:
            tables = tomllib.loads(config_path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SchemaError(f"{config_path}: cannot be read as TOML ({error}).") from None
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or not name:
            raise SchemaError(f"--set {override!r}: expected section.key=value, e.g. train.steps=200.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        tables.setdefault(section, {})[name] = value
    return tables


def resolve(tables: Mapping[str, Any], where: str) -> Config:
    """Checks the tables against the settings there are.

    Raises:
        SchemaError: Lists every unknown key and refused value.
    """
    return decode(Config, dict(tables), where)
