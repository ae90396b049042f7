"""Files of a model's folder: configurations, safetensors headers, which file holds which tensor. What is broken is named.

Reads the folder of one component in the layout of diffusers or transformers.
"""

import json
from pathlib import Path
from typing import Any

from diffusers.utils.hub_utils import _add_variant
from safetensors import SafetensorError, safe_open

WEIGHT_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
"""Of diffusers' and of transformers' models; sharded ones have an index beside them."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: The file is missing, is not JSON, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}). Download or save the model again.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Download or save the model again.") from None
    if not isinstance(data, dict):
        raise ValueError(
            f"{path}: got a {type(data).__name__}, expected a JSON object. Download or save the model again."
        )
    return data


def open_weights(path: Path) -> Any:
    """A safetensors file, opened: its header is whole and its size is what the header says.

    Raises:
        ValueError: The file is missing, truncated or not safetensors.
    """
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        reason = "it is missing" if not path.is_file() else f"{error}; it is incomplete or damaged"
        raise ValueError(f"{path} cannot be read: {reason}. Download or save the model again.") from None


def weight_files(folder: Path, variant: str | None) -> dict[str, Path]:
    """The safetensors file of each tensor of a component.

    Args:
        folder: Of the component.
        variant: Of the files, e.g. `fp16`, as for diffusers.

    Raises:
        ValueError: There are none, or the index is broken.
    """
    for name in WEIGHT_NAMES:
        index_path = folder / _add_variant(f"{name}.index.json", variant)
        if index_path.is_file():
            if not isinstance(names := read_json(index_path).get("weight_map"), dict):
                raise ValueError(f"{index_path} has no 'weight_map'. Download or save the model again.")
            return {tensor: folder / file for tensor, file in names.items()}
        path = folder / _add_variant(name, variant)
        if path.is_file():
            with open_weights(path) as file:
                return dict.fromkeys(file.keys(), path)
    if any(folder.glob("*.bin")):
        raise ValueError(
            f"{folder} has its weights as .bin only, expected safetensors. Convert the model: "
            "diffusers.DiffusionPipeline.from_pretrained(OLD).save_pretrained(NEW)."
        )
    wanted = " or ".join(_add_variant(name, variant) for name in WEIGHT_NAMES)
    raise ValueError(
        f"{folder}: {wanted} is missing. Save the model as safetensors, or name its variant (export.variant)."
    )
