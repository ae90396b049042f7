"""The manifest of a bundle: what the phone must know before it calls anything. Reads and writes `manifest.json`.

Keep in sync with android_demo's BundleManifest.kt.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime import atomic
from runtime.errors import BundleError
from runtime.schema import decode, encode

SCHEMA = "pocketdit.bundle/1"
FILE_NAME = "manifest.json"

Role = Literal["state", "conditioning", "tail_residual", "target", "weight", "lora", "gradient", "loss"]
DType = Literal["float32", "bfloat16", "float16", "int8", "int32"]
WeightFormat = Literal["fp32", "fp16", "bf16", "int8", "int4"]
"""How frozen linear weights are stored, see export/quantize.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output of a method."""

    name: str
    role: Role
    """Where the runtime finds it: the sample, the block's weight file, the LoRA, or the call before."""
    dtype: DType
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    """Of a linear weight: first row and end in the stored tensor; the shape then has an axis of size 1 in front."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """The contract of one method of the program file: inputs and outputs in call order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    planned_bytes: int
    """Size of the method's planned arena in private memory."""
    workspace_bytes: int = 0
    """XNNPACK's workspace for this method alone, as its planner lays it out; 0 without XNNPACK."""
    flops: int = 0
    """Operations of one call: products and convolutions, a multiply-add as two; 0 is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSpec:
    """The ExecuTorch program file and its methods by name: `<kind>_forward`, `<kind>_backward`, `loss`."""

    file: str
    backend: Literal["xnnpack", "portable"]
    methods: dict[str, MethodSpec]
    workspace_bytes: int = 0
    """Private memory XNNPACK takes beside the arenas, one workspace for all methods; measured at export."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """One trained block, in running order."""

    index: int
    """Position in the base model."""
    kind: str
    """Prefix of its methods; blocks of one kind with LoRA on different layers have programs of their own."""
    module: str
    """The block's module path in the base model, e.g. `transformer_blocks.4`."""
    file: str
    inputs: dict[str, str] = field(default_factory=dict)
    """Inputs of the program that differ from block to block, and their names in the sample store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSpec:
    """The frozen base model this bundle was cut from."""

    family: str
    model: str
    revision: str | None = None
    variant: str | None = None
    sha256: str
    """Hash over the configuration and weights of the transformer."""
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CutSpec:
    """How many blocks are skipped at either end."""

    head: int
    tail: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Low-rank adaptation: W + (alpha / rank) B A."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    """As PEFT's `target_modules`."""
    prefix: str
    """What diffusers puts before the module path in an adapter's keys, e.g. `transformer`."""
    init_file: str
    convolutions: tuple[str, ...] = ()
    """Module paths of 1x1 convolutions with LoRA: their matrices have two more axes of size 1 in the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """The sample store: shards in order, see sample_store.py."""

    shards: tuple[str, ...]
    count: int
    dtype: Literal["bf16", "int8", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    """Settings of the optimizer loop; `train` may override them."""

    steps: int = 400
    """Optimizer steps."""
    accumulation: int = 4
    """Samples whose mean gradient makes one step."""
    learning_rate: float = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to zero along a half cosine."""
    warmup_steps: int = 0
    weight_decay: float = 0.01
    """Decoupled, per step times the learning rate."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0 turns clipping off."""
    seed: int = 0
    """Shuffles the order of the samples, one permutation per pass."""
    checkpoint_every: int = 50
    """Optimizer steps between checkpoints."""

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a positive number")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 <= {name} < 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSpec:
    """The memory the bundle was exported for; `train` keeps to it unless told another."""

    mib: int
    """Most private memory beyond the idle process, MiB."""
    planned_bytes: int
    """What training was counted to take when the settings were chosen."""
    reasons: tuple[str, ...]
    """What was chosen, then what was too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhotoSpec:
    """One source photo; only a small preview travels."""

    name: str
    sha256: str
    caption: str
    preview: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectSpec:
    """What is taught."""

    instance_prompt: str
    photos: tuple[PhotoSpec, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpec:
    """Size and hash of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleManifest:
    """Everything but the tensors."""

    schema: str
    created_by: str
    base: BaseSpec
    cut: CutSpec
    blocks: tuple[BlockSpec, ...]
    programs: ProgramSpec
    weights: WeightFormat = "fp32"
    """How the frozen linear weights of the blocks are stored."""
    loss_file: str
    """Weights of the `loss` method: the base model's output layers."""
    lora: LoraSpec
    samples: SampleSpec
    training: TrainingSpec
    subject: SubjectSpec
    budget: BudgetSpec | None = None
    export: dict[str, Any] = field(default_factory=dict)
    """The resolved settings of the export, for the record."""
    files: dict[str, FileSpec] = field(default_factory=dict)


def read_manifest(bundle_dir: Path) -> BundleManifest:
    """Reads and checks `manifest.json`.

    Raises:
        BundleError: The folder is no bundle, the JSON is broken, or the schema is another version.
        SchemaError: Keys are unknown, missing or of the wrong type.
    """
    path = bundle_dir / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(
            f"{bundle_dir} is not a bundle: it has no {FILE_NAME}. Make one with `pocketdit export`."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BundleError(f"{path} is not JSON ({error}). Export the bundle again.") from None
    got = data.get("schema") if isinstance(data, dict) else None
    if got != SCHEMA:
        raise BundleError(f"{path}: schema is {got!r}, this version reads {SCHEMA!r}. Export the bundle again.")
    return decode(BundleManifest, data, str(path))


def write_manifest(bundle_dir: Path, manifest: BundleManifest) -> None:
    """Writes `manifest.json` atomically; it is the last file of a bundle, so a bundle without it is unfinished."""
    atomic.write_json(bundle_dir / FILE_NAME, encode(manifest))
