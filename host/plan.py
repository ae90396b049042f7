"""What training would cost, from a transformer's configuration alone: no weights, no autoencoder, nothing computed.

    print(table(plan(config, cut=(19, 10), **PUBLISHED["FluxTransformer2DModel"])))

Phone rows are the product; GPU rows are the paper's methods, counted (host/model_costs.py), not fitted: bf16 weights of what
is not skipped; the LoRA with gradient and two moments in float32; and everything that diffusers' own block, with PEFT's LoRA
in it, run on the meta device under CUDA's autocast rules, saves for its backward pass (distinct storages, parameters left
out). With the settings `PUBLISHED`, against the measurements of the paper (DiT-BlockSkip, arXiv 2603.20755), GiB:

    FLUX.1-dev   LoRA 512²           35.99   counted 36.18   +0.5 %
                 LoRA, 256² patches  30.48           30.68   +0.7 %
                 skipping 50 %       12.85           12.80   -0.4 %
                 both, 30 %          20.78           20.89   +0.5 %
                 both, 50 %          10.42           10.43   +0.1 %
    SANA-1.6B    LoRA 1024²           8.35            6.84    -18 %
                 both, 50 %           3.10            2.27    -27 %

The assumptions, the same for every row:

- Rank 64 on the layers that diffusers' `train_dreambooth_lora_flux.py` (attention and feed-forward) and
  `train_dreambooth_lora_sana.py` (to_q, to_k, to_v) train. The paper does not say; but its parameter share of FLUX LoRA,
  22.84 GiB, is 22.17 GiB of bf16 base and 0.67 GiB of this LoRA in float32. (Rank 128 in bf16 would take as much.)
- Mixed precision as `accelerate` does it: under autocast a layer normalisation saves its input in float32, and each LoRA
  layer a bf16 copy of its own input. What 768 more tokens cost checks this apart from all constants: by the paper's rows
  5.51 GiB over 57 blocks and 2.43 over 28, counted 5.50 and 2.37.
- 512 prompt tokens in FLUX, 300 in SANA; a memory-efficient attention kernel; AdamW with float32 moments; batch size 1.
- diffusers' own `RMSNorm` for FLUX's queries and keys: it saves its input in float32 and in bf16. With torch's, which the
  installed diffusers has there, the FLUX rows would be 2 to 4 % lower and fit less well, within 5 % too.
- (7, 10) and (19, 10) skipped in FLUX. Neither skipped blocks nor text encoders nor the autoencoder are in memory; no CUDA
  context, no workspace, nothing that only the block in work holds (about 0.1 GiB).

SANA does not fit. LoRA: diffusers' SANA script keeps the autoencoder on the GPU in float32 (DC-AE f32c32: 312 M parameters,
1.16 GiB); with it the count is 8.00 GiB, 4 % low. Skipping 50 %: the missing 0.8 GiB is unexplained. Stored residuals need no
autoencoder, and with it the count would be 11 % high; tokens cannot be it, as these are a quarter of the row before over half
of its blocks. Skipping 30 % is counted at 3.14 GiB: the notes this figure comes from may have meant that row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from host.config import ExportConfig
from host.model_costs import (
    ATTENTION,
    GIB,
    WEIGHTS,
    ModelCosts,
    PlanRow,
    adapter_for,
    num_parameters,
)
from host.models.folder import skeleton_of
from host.patches import default_side
from runtime.memory import MIB

PAPER_CUTS = {17: (7, 10), 23: (13, 10), 29: (19, 10)}
"""The paper's picks for FLUX.1-dev by the number of its 57 blocks skipped."""
_FLUX_LAYERS = [
    *(f"attn.{n}" for n in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{n}.{layer}" for n in ("ff", "ff_context") for layer in ("net.0.proj", "net.2")),
]
PUBLISHED: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "image_side": 512, "patch_side": 256, "prompt_tokens": 512, "latent_factor": 8, "lora_rank": 64,
        "lora_targets": tuple(_FLUX_LAYERS),
    },
    "SanaTransformer2DModel": {
        "image_side": 1024, "patch_side": 512, "prompt_tokens": 300, "latent_factor": 32, "lora_rank": 64,
        "lora_targets": ("to_q", "to_k", "to_v"),
    },
    "SD3Transformer2DModel": {"image_side": 1024, "patch_side": 512, "prompt_tokens": 77 + 256, "latent_factor": 8},
}  # fmt: skip
"""Settings of the paper's measurements, see above, by transformer class: keyword arguments of `plan`. The paper has no SD3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings that fit a budget, and what they cost."""

    cut: tuple[int, int]
    patch_side: int
    weights: str
    row: PlanRow


def plan(
    config: Mapping[str, Any],
    *,
    cut: tuple[int, int],
    patch_side: int,
    image_side: int,
    weights: Sequence[str] = WEIGHTS,
    **settings: Any,
) -> list[PlanRow]:
    """What training costs: on the phone, by the type of the weights, and on a GPU by the paper's methods.

    Args:
        config: The transformer's `config.json`, `_class_name` included.
        cut: Blocks skipped at the head and at the tail, of the phone's rows.
        patch_side: Side of the patches, pixels.
        image_side: Side of whole pictures, pixels, for the rows that train on them.
        weights: Types of the phone's rows, of `WEIGHTS`.
        **settings: By keyword: `prompt_tokens`, length of a prompt; `latent_factor`, pixels per latent along one side;
            `lora_rank` (4) and `lora_targets` (attention), as in the export's settings; `samples` (256), `sample_dtype`
            (`bf16`) and `accumulation` (4), samples per step.

    Returns:
        A row per type of weights, then LoRA, LoRA on patches, skipping 50 %, and skipping 30 % and 50 % on patches.

    Raises:
        ValueError: No adapter knows the class, the cut leaves nothing, a side is not a multiple of the token's size, no
            layer gets LoRA, or a type is unknown.
    """
    if patch_side > image_side:
        raise ValueError(f"patch_side {patch_side} exceeds image_side {image_side}.")
    patch, image = (ModelCosts(config, side, **settings) for side in (patch_side, image_side))
    rows = [patch.phone_row(cut, dtype) for dtype in weights]
    for name, model, share in (
        ("LoRA", image, 0.0),
        ("LoRA, patches", patch, 0.0),
        ("skipping 50 %", image, 0.5),
        ("skipping 30 %, patches", patch, 0.3),
        ("skipping 50 %, patches", patch, 0.5),
    ):
        rows.append(model.gpu_row(f"GPU: {name}", cut_of_share(len(model.blocks), share)))
    return rows


def fitting(
    config: Mapping[str, Any],
    budget_bytes: int,
    *,
    image_side: int,
    latent_factor: int,
    flash_bytes: int | None = None,
    shares: Iterable[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    patch_sides: Iterable[int] | None = None,
    weights: Sequence[str] = WEIGHTS,
    **settings: Any,
) -> list[Setting]:
    """Settings whose private memory fits, best first: fewest blocks skipped, then largest patch, then most exact weights.

    Args:
        config: As for `plan`.
        budget_bytes: Private memory beyond the idle process.
        image_side: Side of whole pictures, pixels.
        latent_factor: Pixels per latent along one side.
        flash_bytes: Most that bundle and samples may take on flash; None is no limit.
        shares: Shares of the blocks to try to skip.
        patch_sides: Sides to try, pixels; None tries quarters of `image_side` that make whole tokens.
        weights: Types to try.
        **settings: Of `plan`, by keyword: `prompt_tokens` and those with defaults.

    Returns:
        An empty list if nothing fits.

    Raises:
        ValueError: As `plan`.
    """
    if patch_sides is None:
        multiple = latent_factor * adapter_for(config).normalized_config(skeleton_of(config).config).patch_size
        patch_sides = [image_side * i // 4 for i in (4, 3, 2, 1) if (image_side * i // 4) % multiple == 0]
    found = []
    for side in patch_sides:
        model = ModelCosts(config, side, latent_factor=latent_factor, **settings)
        for cut in dict.fromkeys(cut_of_share(len(model.blocks), share) for share in shares):
            for row in (model.phone_row(cut, dtype) for dtype in weights):
                on_flash = row.weight_bytes + row.sample_bytes
                if row.private_bytes <= budget_bytes and (flash_bytes is None or on_flash <= flash_bytes):
                    found.append(Setting(cut=cut, patch_side=side, weights=row.weights, row=row))
    return sorted(found, key=lambda s: (sum(s.cut), -s.patch_side, WEIGHTS.index(s.weights)))


def settings_for(config: Mapping[str, Any], vae_config: Mapping[str, Any], export: ExportConfig) -> dict[str, Any]:
    """Keyword arguments of `plan` from an export's settings; where they leave it open, what `export` or the paper takes.

    Args:
        config: The transformer's.
        vae_config: The autoencoder's, or nothing.
        export: Of the configuration file.
    """
    names = adapter_for(config).normalized_config(skeleton_of(config).config)
    known = PUBLISHED[config["_class_name"]]
    factor = vae_config.get("block_size", known["latent_factor"])
    if channels := vae_config.get("encoder_block_out_channels") or vae_config.get("block_out_channels"):
        factor = 2 ** (len(channels) - 1)
    image_side = export.image_side or names.image_size * factor
    multiple = factor * names.patch_size
    return {
        "image_side": image_side,
        "patch_side": export.patch_side or default_side(image_side, multiple),
        "prompt_tokens": export.prompt_tokens or known["prompt_tokens"],
        "latent_factor": factor,
        "lora_rank": export.lora_rank,
        "lora_targets": export.lora_targets,
        "samples": export.samples,
        "sample_dtype": export.sample_dtype,
    }


def num_blocks(config: Mapping[str, Any]) -> int:
    """Blocks of a transformer."""
    return len(adapter_for(config).blocks(skeleton_of(config)))


def skipped_of_share(num_blocks: int, share: float) -> int:
    """Blocks skipped for a share of all, to the nearest; one is always left."""
    if not 0 <= share < 1:
        raise ValueError(f"share: got {share}, expected 0 or more and less than 1")
    return min(int(share * num_blocks + 0.5), num_blocks - 1)


def cut_of_share(num_blocks: int, share: float) -> tuple[int, int]:
    """Blocks skipped at head and tail for a share of all: the paper's for FLUX's 57 blocks where it has one, else half each."""
    skipped = skipped_of_share(num_blocks, share)
    return PAPER_CUTS[skipped] if num_blocks == 57 and skipped in PAPER_CUTS else (skipped - skipped // 2, skipped // 2)


def parameter_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of one block of each kind, by kind, and of everything that is in no block, as `rest`."""
    transformer = skeleton_of(config)
    blocks = adapter_for(config).blocks(transformer)
    sizes = {block.module: num_parameters(transformer.get_submodule(block.module)) for block in blocks}
    kinds = {block.kind: sizes[block.module] for block in blocks}
    return kinds | {"rest": num_parameters(transformer) - sum(sizes.values())}


def table(rows: Sequence[PlanRow]) -> str:
    """Aligned text, one line a row, memory in MiB or GiB."""
    header = (
        "method|weights|cut|side|trained|shipped|private|weights on flash|samples on flash|streamed/step|TFLOP/step"
    )
    lines = [header.split("|")]
    for row in rows:
        sizes = (row.private_bytes, row.weight_bytes, row.sample_bytes, row.streamed_bytes_per_step)
        lines.append(
            [row.method, row.weights, f"{row.cut[0]},{row.cut[1]}", str(row.side)]
            + [f"{count / 1e6:.1f} M" for count in (row.trained_parameters, row.shipped_parameters)]
            + [f"{s / GIB:.2f} GiB" if s >= GIB else f"{s / MIB:.1f} MiB" if s else "-" for s in sizes]
            + [f"{row.tflops_per_step:.3g}"]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    adjusted = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join([line[0].strip().ljust(widths[0]), *line[1:]]) for line in adjusted)
