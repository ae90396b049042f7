"""Adapters in the format of kohya's sd-scripts, which ComfyUI and most other programs read: from PEFT's and back.

PEFT, as runtime/adapter.py writes it: `transformer.<module>.lora_A.weight` (R, I), `.lora_B.weight` (O, R), and r and alpha
in the metadata. Kohya: `lora_unet_<module, underscores for dots>.lora_down.weight` (R, I), `.lora_up.weight` (O, R) and
`.alpha` (). Both add alpha / R * B A to a weight; 1x1 convolutions have two more axes of size 1. FLUX modules go by the names
of its first release, where q, k, v (and in single blocks the MLP) are one layer.

    convert_file(Path("runs/dog/adapter.safetensors"), Path("dog.safetensors"), "kohya", family=folder.adapter.family,
                 module_names=lora_candidates(folder.skeleton()))    # folder: a `ModelFolder`
"""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from runtime.errors import BundleError
from runtime.tensor_file import TensorFile, write_tensor_file

logger = logging.getLogger(__name__)

Format = Literal["kohya", "peft"]
SUFFIXES: dict[Format, tuple[str, ...]] = {
    "kohya": (".lora_down.weight", ".lora_up.weight", ".alpha"),
    "peft": (".lora_A.weight", ".lora_B.weight"),
}
PEFT_PREFIX = "transformer."
PEFT_CONFIG = "lora_adapter_metadata"
KOHYA_PREFIX = "lora_unet_"
KOHYA_DIFFUSERS_PREFIX = "lora_transformer_"
"""Before diffusers' module paths, in files of trainers built on diffusers; read, never written."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one kohya name stands for."""

    modules: tuple[str, ...]
    """diffusers modules whose outputs stand one below the other in it; `{}` is the block's number."""
    rows: tuple[int, ...] = (1,)
    """Shares of the modules in its output rows."""
    halves_swapped: bool = False
    """The first release has shift before scale here, diffusers scale before shift."""


_DOUBLE, _SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."
LAYERS: dict[str, dict[str, Layer]] = {
    "flux": {
        "double_blocks_{}_img_attn_qkv": Layer(tuple(f"{_DOUBLE}attn.to_{x}" for x in "qkv"), (1, 1, 1)),
        "double_blocks_{}_img_attn_proj": Layer((f"{_DOUBLE}attn.to_out.0",)),
        "double_blocks_{}_img_mlp_0": Layer((f"{_DOUBLE}ff.net.0.proj",)),
        "double_blocks_{}_img_mlp_2": Layer((f"{_DOUBLE}ff.net.2",)),
        "double_blocks_{}_img_mod_lin": Layer((f"{_DOUBLE}norm1.linear",)),
        "double_blocks_{}_txt_attn_qkv": Layer(tuple(f"{_DOUBLE}attn.add_{x}_proj" for x in "qkv"), (1, 1, 1)),
        "double_blocks_{}_txt_attn_proj": Layer((f"{_DOUBLE}attn.to_add_out",)),
        "double_blocks_{}_txt_mlp_0": Layer((f"{_DOUBLE}ff_context.net.0.proj",)),
        "double_blocks_{}_txt_mlp_2": Layer((f"{_DOUBLE}ff_context.net.2",)),
        "double_blocks_{}_txt_mod_lin": Layer((f"{_DOUBLE}norm1_context.linear",)),
        "single_blocks_{}_linear1": Layer(
            (*(f"{_SINGLE}attn.to_{x}" for x in "qkv"), f"{_SINGLE}proj_mlp"), (1, 1, 1, 4)
        ),
        "single_blocks_{}_linear2": Layer((f"{_SINGLE}proj_out",)),
        "single_blocks_{}_modulation_lin": Layer((f"{_SINGLE}norm.linear",)),
        # diffusers 0.42.1 drops all that follow when it reads them: their new names lack `transformer.`.
        "img_in": Layer(("x_embedder",)),
        "txt_in": Layer(("context_embedder",)),
        "time_in_in_layer": Layer(("time_text_embed.timestep_embedder.linear_1",)),
        "time_in_out_layer": Layer(("time_text_embed.timestep_embedder.linear_2",)),
        "vector_in_in_layer": Layer(("time_text_embed.text_embedder.linear_1",)),
        "vector_in_out_layer": Layer(("time_text_embed.text_embedder.linear_2",)),
        "guidance_in_in_layer": Layer(("time_text_embed.guidance_embedder.linear_1",)),
        "guidance_in_out_layer": Layer(("time_text_embed.guidance_embedder.linear_2",)),
        "final_layer_adaLN_modulation_1": Layer(("norm_out.linear",), halves_swapped=True),
        "final_layer_linear": Layer(("proj_out",)),
    }
}
"""Families whose kohya names are not diffusers' module paths: kohya name without prefix -> layer."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Adds alpha / R * up @ down to a weight."""

    down: Tensor
    """(R, I), or (R, I, 1, 1)."""
    up: Tensor
    """(O, R), or (O, R, 1, 1)."""
    alpha: float

    @property
    def rank(self) -> int:
        """R."""
        return self.down.shape[0]


def to_kohya(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """PEFT to kohya. Layers fused there get a block-diagonal `lora_up`, with zeros where a layer has no adapter.

    Args:
        tensors: By PEFT's names.
        metadata: r and alpha under `lora_adapter_metadata`; without it alpha is R, as for diffusers, and a warning says so.
        family: As `ModelAdapter.family`.

    Returns:
        Tensors by kohya's names, `.alpha` () float32, and the metadata to write: `pocketdit.*` is kept.

    Raises:
        ValueError: Not a PEFT adapter, incomplete, or on modules the family does not have.
    """
    loras = _peft_loras(tensors, metadata)
    converted: dict[str, Tensor] = {}
    for name, layer in _layers(loras, family).items():
        lora = _fuse(name, [loras.get(module) for module in layer.modules], layer.rows)
        values = (lora.down, _swapped(lora.up, layer), torch.tensor(lora.alpha, dtype=torch.float32))
        converted |= {f"{KOHYA_PREFIX}{name}{end}": value for end, value in zip(SUFFIXES["kohya"], values, strict=True)}
    # PEFT's configuration has to go: diffusers would apply its alpha on top of the explicit ones.
    return converted, {"format": "pt"} | _own(metadata)


def from_kohya(
    tensors: Mapping[str, Tensor], module_names: Collection[str], family: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Kohya to PEFT. Block-diagonal fused layers come apart bit for bit; of others, each part gets the whole `lora_down`.

    Args:
        tensors: By kohya's names. Without `.alpha` alpha is R, as in sd-scripts, and a warning says so.
        module_names: Of the transformer, see `lora_candidates` of export/weights.py:
            underscores alone do not tell where the dots were.
        family: As `ModelAdapter.family`.

    Returns:
        Tensors by PEFT's names, and the metadata diffusers rebuilds rank and alpha from.

    Raises:
        ValueError: Not a kohya adapter, incomplete, or keys that match no module.
    """
    layers = {KOHYA_PREFIX + name: layer for name, layer in _layers(module_names, family).items()}
    layers |= {KOHYA_DIFFUSERS_PREFIX + name: layer for name, layer in _layers(module_names, "").items()}
    loras = _kohya_loras(tensors)
    _require_known(loras, layers)
    parts: dict[str, Lora] = {}
    for name, lora in loras.items():
        layer = layers[name]
        whole = Lora(lora.down, _swapped(lora.up, layer), lora.alpha)
        for module, part in zip(layer.modules, _split(name, whole, layer.rows), strict=True):
            if part and module in parts:
                raise ValueError(f"{name} is a second adapter on {module}. Keep one of the two and convert again.")
            parts |= {module: part} if part else {}
    converted: dict[str, Tensor] = {}
    for module, lora in parts.items():
        values = zip(SUFFIXES["peft"], (lora.down, lora.up), strict=True)
        converted |= {f"{PEFT_PREFIX}{module}{end}": value.contiguous() for end, value in values}
    ranks = {module: lora.rank for module, lora in parts.items()}
    alphas = {module: _shortest(lora.alpha) for module, lora in parts.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(parts)}
    # PEFT matches these as the end of a path; `^` makes them whole paths.
    if rank_pattern := {f"^{module}": value for module, value in ranks.items() if value != rank}:
        config["rank_pattern"] = rank_pattern
    if alpha_pattern := {f"^{module}": value for module, value in alphas.items() if value != alpha}:
        config["alpha_pattern"] = alpha_pattern
    config = {PEFT_PREFIX + key: value for key, value in config.items()}
    return converted, {"format": "pt", PEFT_CONFIG: json.dumps(config, sort_keys=True)}


def convert_file(source: Path, target: Path, to: Format, *, family: str, module_names: Collection[str]) -> None:
    """Converts an adapter file; `target` is replaced atomically, `source` only read. `pocketdit.*` metadata is kept.

    Args:
        source: A safetensors file in the other format.
        target: Another path.
        to: The format of `target`.
        family: As `ModelAdapter.family`.
        module_names: Of the transformer, see `lora_candidates` of export/weights.py.

    Raises:
        ValueError: `source` cannot be read or converted, or is `target`; nothing is written.
    """
    if source.resolve() == target.resolve() or (source.exists() and target.exists() and source.samefile(target)):
        raise ValueError(f"{target} is the file to convert, which is only read. Give another path for the result.")
    try:
        file = TensorFile(source)
        tensors = {name: file.tensor(name) for name in file.names()}
    except (BundleError, OSError) as error:
        reason = str(error).removesuffix(" Export the bundle again.").removeprefix(f"{source}: ")
        raise ValueError(f"{source} cannot be read ({reason}). Give an adapter as .safetensors.") from None
    except KeyError as error:
        raise ValueError(f"{source} has tensors of type {error}; save it as float32, float16 or bfloat16.") from None
    try:
        if to == "kohya":
            converted, metadata = to_kohya(tensors, file.metadata, family)
            _require_known({_stem(name) for name in tensors}, {PEFT_PREFIX + name for name in module_names})
        else:
            converted, metadata = from_kohya(tensors, module_names, family)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    write_tensor_file(target, converted, metadata | _own(file.metadata))


def _layers(modules: Iterable[str], family: str) -> dict[str, Layer]:
    """Layers with an adapter on any of `modules`, by kohya name without prefix, block numbers filled in."""
    table = LAYERS.get(family)
    names = {module: name for name, layer in (table or {}).items() for module in layer.modules}
    layers: dict[str, Layer] = {}
    for module in modules:
        if table is None:
            name, layer = module.replace(".", "_"), Layer((module,))
            if layers.setdefault(name, layer) != layer:
                raise ValueError(
                    f"{name} would mean both {layers[name].modules[0]} and {module}. Keep the PEFT format."
                )
            continue
        block = (re.findall(r"\.(\d+)\.", module) or [""])[0]
        name = names.get(module.replace(f".{block}.", ".{}.", 1), "")
        if not name:
            raise ValueError(f"{module} is no layer of {family}. Convert with the family the adapter was trained on.")
        parts = tuple(part.format(block) for part in table[name].modules)
        layers[name.format(block)] = replace(table[name], modules=parts)
    return layers


def _pairs(tensors: Mapping[str, Tensor], wanted: Format) -> dict[str, tuple[Tensor, Tensor]]:
    """The (down, up) of every module, by what stands before the suffix; refuses other formats and half adapters."""
    others = [name for name in tensors if not name.endswith(SUFFIXES[wanted])]
    if others or not tensors:
        found = [kind for kind, ends in SUFFIXES.items() if any(name.endswith(ends) for name in tensors)]
        raise ValueError(
            f"expected {wanted} keys alone ({', '.join(SUFFIXES[wanted])}), got {' and '.join(found) or 'no LoRA'} keys, e.g. "
            f"{others[:2]}. Convert a file that is in one format, in the direction that reads it."
        )
    pairs = {}
    for stem in dict.fromkeys(_stem(name) for name in tensors):
        if missing := [end for end in SUFFIXES[wanted][:2] if stem + end not in tensors]:
            raise ValueError(f"{stem} has no {' and no '.join(missing)}: the file is incomplete. Save it again.")
        down, up = (tensors[stem + end] for end in SUFFIXES[wanted][:2])
        if down.ndim != up.ndim or down.ndim not in (2, 4) or up.shape[1] != down.shape[0]:
            raise ValueError(
                f"{stem}: got {tuple(down.shape)} and {tuple(up.shape)}, expected (R, I) and (O, R), the same with two more "
                "axes for convolutions. Save the adapter again."
            )
        pairs[stem] = (down, up)
    return pairs


def _peft_loras(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Lora]:
    """By diffusers' module path."""
    pairs = _pairs(tensors, "peft")
    if strays := [stem for stem in pairs if not stem.startswith(PEFT_PREFIX)]:
        raise ValueError(f"{strays[0]} does not start with {PEFT_PREFIX!r}: only the transformer's LoRA is converted.")
    config: dict[str, Any] = {}
    if PEFT_CONFIG not in metadata:
        logger.warning("No %s in the metadata: alpha is taken to equal the rank, as by diffusers.", PEFT_CONFIG)
    else:
        try:
            config = {key.removeprefix(PEFT_PREFIX): value for key, value in json.loads(metadata[PEFT_CONFIG]).items()}
            config["lora_alpha"] = float(config["lora_alpha"])
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"metadata {PEFT_CONFIG}: {error!r}, expected JSON with {PEFT_PREFIX}lora_alpha. Save the adapter again."
            ) from None
    patterns = config.get("alpha_pattern") or {}
    loras = {}
    for stem, (down, up) in pairs.items():
        module, rank = stem.removeprefix(PEFT_PREFIX), down.shape[0]
        alpha = patterns.get(get_pattern_key(list(patterns), module), config.get("lora_alpha", rank))
        # Rank-stabilised LoRA divides by the root of the rank.
        loras[module] = _lora(module, down, up, alpha * (math.sqrt(rank) if config.get("use_rslora") else 1))
    return loras


def _kohya_loras(tensors: Mapping[str, Tensor]) -> dict[str, Lora]:
    """By kohya's name, prefix included."""
    pairs = _pairs(tensors, "kohya")
    if without := [name for name in pairs if f"{name}.alpha" not in tensors]:
        logger.warning("No .alpha in %d modules, e.g. %s: it is taken to equal the rank.", len(without), without[0])
    loras = {}
    for name, (down, up) in pairs.items():
        alpha = tensors.get(f"{name}.alpha", torch.tensor(down.shape[0]))
        if alpha.numel() != 1:
            raise ValueError(f"{name}.alpha has shape {tuple(alpha.shape)}, expected one number. Save it again.")
        loras[name] = _lora(name, down, up, _shortest(alpha.item()))
    return loras


def _lora(name: str, down: Tensor, up: Tensor, alpha: float) -> Lora:
    if not 0 < alpha < math.inf:
        raise ValueError(f"{name} has alpha {alpha}, expected a positive number. Save the adapter with its alpha.")
    return Lora(down, up, float(alpha))


def _fuse(name: str, loras: Sequence[Lora | None], rows: Sequence[int]) -> Lora:
    """One LoRA of N layers whose outputs stand one below the other: rank N R, alpha / rank as before."""
    present = [(lora, share) for lora, share in zip(loras, rows, strict=True) if lora]
    kinds = {(lora.rank, lora.alpha, lora.up.shape[0] / share, lora.down.shape[1]) for lora, share in present}
    if len(kinds) > 1:
        raise ValueError(
            f"the adapters in {name} differ: (rank, alpha, rows per share, inputs) are {sorted(kinds)}. They become one layer, "
            "which takes the same for all. Keep the PEFT format."
        )
    lora, share = present[0]
    if len(loras) == 1:
        return lora
    unit = lora.up.shape[0] // share
    downs = [part.down if part else torch.zeros_like(lora.down) for part in loras]
    ups = [p.up if p else lora.up.new_zeros(unit * n, lora.rank) for p, n in zip(loras, rows, strict=True)]
    return Lora(torch.cat(downs), torch.block_diag(*ups), lora.alpha * len(loras))


def _split(name: str, lora: Lora, rows: Sequence[int]) -> list[Lora | None]:
    """The parts of a fused layer; None for one without an adapter."""
    count = len(rows)
    if count == 1:
        return [lora]
    unit, rest = divmod(lora.up.shape[0], sum(rows))
    if rest:
        raise ValueError(
            f"{name} has {lora.up.shape[0]} rows, expected a multiple of {sum(rows)}. Convert with the adapter's own family."
        )
    ups = lora.up.split([unit * share for share in rows])
    rank, rest = divmod(lora.rank, count)
    grid = [] if rest else [up.split(rank, 1) for up in ups]
    if rest or not lora.down.any() or any(grid[i][j].any() for i in range(count) for j in range(count) if i != j):
        return [Lora(lora.down, up, lora.alpha) for up in ups]
    # `lora_A` starts random, so where both are zero there was no adapter.
    return [
        Lora(down, grid[i][i], lora.alpha / count) if down.any() or grid[i][i].any() else None
        for i, down in enumerate(lora.down.split(rank))
    ]


def _swapped(up: Tensor, layer: Layer) -> Tensor:
    return up.roll(len(up) // 2, 0) if layer.halves_swapped else up


def _stem(name: str) -> str:
    """A tensor's name without its suffix."""
    return re.sub("|".join(re.escape(end) + "$" for ends in SUFFIXES.values() for end in ends), "", name)


def _own(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key.startswith("pocketdit.")}


def _require_known(names: Collection[str], known: Collection[str]) -> None:
    if strays := sorted(name for name in names if name not in known):
        raise ValueError(
            f"{len(strays)} of {len(names)} modules match none of the model's, e.g. {strays[:3]}; expected e.g. "
            f"{sorted(known)[:2]}. Convert with the model the adapter was trained on, without text encoders."
        )


def _shortest(value: float) -> float:
    """The shortest decimal that is `value` in float32, in which kohya's alpha is stored: 0.1, not 0.10000000149."""
    return float(str(np.float32(value)))
