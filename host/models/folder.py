"""A model's folder in diffusers' layout, or its hub id: which family it is, and its components on demand.

Reads `model_index.json` and one subfolder a component. Components are loaded one at a time and freed by the caller;
the transformer can be had one block at a time.
"""

import gc
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from diffusers.utils.hub_utils import _add_variant
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from torch import Tensor, nn

from host.models.base import ModelAdapter, PromptRequest, PromptStates, TransformerConfig, adapter_of, bare_pipeline
from runtime.bundle import sha256_file

EMBEDDED = "tiny-base"
EMBEDDED_DIR = Path(__file__).parents[1] / "tiny_base"
# Libraries a model_index.json may name; anything else would import code that came with a model.
COMPONENT_LIBRARIES = ("diffusers", "transformers", "host.tiny_base")


class ModelFolder:
    """A model's folder: its adapter, its components on demand.

    Attributes:
        name: As the user gave it.
        dir: The folder.
        adapter: The family's adapter.
        config: The transformer's configuration.
    """

    def __init__(self, model: str, revision: str | None = None, variant: str | None = None) -> None:
        """Finds the model.

        Args:
            model: A folder, a hub id, or `tiny-base` for the embedded model.
            revision: Branch, tag or commit on the hub.
            variant: Of the weight files, e.g. `fp16`, as for diffusers.

        Raises:
            ValueError: There is no such model, it is not in diffusers' layout, or its family has no adapter.
        """
        self.name, self.variant = model, variant
        self.dir = EMBEDDED_DIR if model == EMBEDDED else _local_dir(model, revision, variant)
        try:
            self._index = json.loads((self.dir / "model_index.json").read_text(encoding="utf-8"))
            self.config = json.loads((self.dir / "transformer" / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.dir} is not a diffusion transformer in diffusers' layout: {error.filename} is missing. Give a folder "
                f"with model_index.json and transformer/, a hub id, or {EMBEDDED!r}."
            ) from None
        self.adapter = adapter_of(self.config.get("_class_name"), model)

    @cached_property
    def normalized_config(self) -> TransformerConfig:
        """The configuration under the names all families share."""
        return self.adapter.normalized_config(SimpleNamespace(**self.config))

    def skeleton(self) -> Any:
        """The transformer on the meta device: modules and shapes from the configuration alone, no weights."""
        return skeleton_of(self.config)

    def hollow(self, device: torch.device | str = "cpu") -> Any:
        """The transformer with everything but its blocks loaded, float32; `block` lends it those."""
        with init_empty_weights():  # buffers are computed, parameters are on the meta device
            transformer = getattr(diffusers, self.config["_class_name"]).from_config(self.config)
        paths = tuple(f"{block.module}." for block in self.adapter.blocks(transformer))
        names = [name for name in transformer.state_dict() if not name.startswith(paths)]
        self._fill(transformer, "", names, device)
        for module in transformer.modules():
            module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None})
        return transformer.eval().requires_grad_(False)

    @contextmanager
    def block(self, transformer: Any, index: int, device: torch.device | str = "cpu") -> Iterator[None]:
        """Loads the weights of one block of a hollow transformer, float32, and drops them at the end of the context."""
        path = self.adapter.blocks(transformer)[index].module
        module = transformer.get_submodule(path)
        self._fill(module, f"{path}.", list(module.state_dict()), device)
        module.requires_grad_(False)
        yield
        module.to("meta")

    def _fill(self, module: nn.Module, prefix: str, names: Sequence[str], device: torch.device | str) -> None:
        files = self._weight_files
        if missing := [name for name in names if prefix + name not in files]:
            raise ValueError(
                f"{self.dir}/transformer: the weights lack {prefix}{missing[0]} and {len(missing) - 1} more. The "
                "configuration and the weights belong to different models, or a file is missing."
            )
        state: dict[str, Tensor] = {}
        for path in sorted({files[prefix + name] for name in names}):
            with safe_open(path, "pt") as file:
                state |= {
                    n: file.get_tensor(prefix + n).to(device, torch.float32) for n in names if files[prefix + n] == path
                }
        try:
            module.load_state_dict(state, strict=False, assign=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(
                f"{self.dir}/transformer: the weights do not fit config.json ({prefix}{reason}). They belong to different "
                "models; get both from the same place."
            ) from None

    @cached_property
    def _weight_files(self) -> dict[str, Path]:
        """The transformer's safetensors file of each tensor."""
        folder = self.dir / "transformer"
        index_path = folder / _add_variant(SAFE_WEIGHTS_INDEX_NAME, self.variant)
        if index_path.is_file():
            names = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in names.items()}
        path = folder / _add_variant(SAFETENSORS_WEIGHTS_NAME, self.variant)
        if not path.is_file():
            raise ValueError(f"{path} is missing. Save the model as safetensors, or name its variant (export.variant).")
        with safe_open(path, "pt") as file:
            return dict.fromkeys(file.keys(), path)

    def encode_prompts(
        self, prompts: Sequence[str], *, max_tokens: int | None = None, negative: bool = False, blank: bool = False
    ) -> PromptStates:
        """Prompts to prompt states, see `ModelAdapter.encode_prompts`; the encoders are freed again."""
        request = PromptRequest(
            texts=list(prompts), config=self.normalized_config, max_tokens=max_tokens, negative=negative, blank=blank
        )
        states = self.adapter.encode_prompts(self.load, request)
        gc.collect()
        return states

    def denoise(
        self,
        transformer: Any,
        prompts: PromptStates,
        negative: PromptStates | None,
        latents: Tensor,
        *,
        steps: int,
        guidance: float,
    ) -> Tensor:
        """Samples latents (B, C, H, W) from noise with the pipeline that model_index.json names."""
        pipeline_class = getattr(diffusers, self._index["_class_name"], self.adapter.pipeline)
        pipeline = bare_pipeline(pipeline_class, transformer=transformer, scheduler=self.load("scheduler"))

        def run(**inputs: Any) -> Tensor:
            return pipeline(num_inference_steps=steps, guidance_scale=guidance, output_type="latent", **inputs).images

        return self.adapter.sample(run, prompts, negative, latents, steps)

    def adapter_file(self) -> str | None:
        """Source file of the adapter: what it says of a block is part of the programs' cache key."""
        return inspect.getsourcefile(type(self.adapter))

    def load(self, component: str) -> Any:
        """Loads one component (`transformer`, `vae`, `text_encoder`, `tokenizer`, `scheduler`), ready for inference.

        Raises:
            ValueError: model_index.json does not name it, or names code outside diffusers, transformers and PocketDiT.
        """
        entry = self._index.get(component)
        if not entry:
            raise ValueError(f"{self.dir}/model_index.json names no {component!r}.")
        library, class_name = entry
        if not any(library == allowed or library.startswith(f"{allowed}.") for allowed in COMPONENT_LIBRARIES):
            raise ValueError(
                f"{self.dir}: {component} wants code from {library!r}; only {COMPONENT_LIBRARIES} are imported."
            )
        options = {"variant": self.variant} if self.variant else {}
        kind = getattr(importlib.import_module(library), class_name)
        loaded = kind.from_pretrained(self.dir, subfolder=component, **options)
        if isinstance(loaded, nn.Module):
            if any(parameter.dtype != torch.float32 for parameter in loaded.parameters()):
                loaded = loaded.to(torch.float32)
            loaded.eval().requires_grad_(False)
        return loaded

    def sha256(self, component: str = "transformer") -> str:
        """Hash over a component's configuration and weights."""
        digest = hashlib.sha256(json.dumps(self._index.get(component)).encode())
        for path in sorted((self.dir / component).glob("*")):
            if path.is_file():
                digest.update(f"{path.name} {sha256_file(path)}\n".encode())
        return digest.hexdigest()


def skeleton_of(config: Mapping[str, Any]) -> Any:
    """diffusers' transformer of a configuration on the meta device: modules and shapes, no weights."""
    with torch.device("meta"):
        transformer = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    return transformer.eval().requires_grad_(False)


def load_lora(adapter: ModelAdapter, transformer: Any, adapter_path: Path) -> None:
    """Loads an adapter with diffusers' loader of the family.

    Raises:
        ValueError: Keys of the file match nothing in the transformer.
    """
    state = adapter.pipeline.lora_state_dict(adapter_path)
    prefix = f"{adapter.lora_prefix}."
    modules = dict(transformer.named_modules())
    strays = [k for k in state if not k.startswith(prefix) or k[len(prefix) :].split(".lora_")[0] not in modules]
    if strays or not state:
        raise ValueError(
            f"{adapter_path}: {len(strays)} of {len(state)} keys match nothing in the model, e.g. {strays[:3]}."
        )
    pipeline = bare_pipeline(adapter.pipeline, transformer=transformer)
    pipeline.load_lora_weights(adapter_path.parent, weight_name=adapter_path.name)


def read_configs(model: str, revision: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of transformer and autoencoder, without their weights.

    Args:
        model: A folder, a hub id, `tiny-base`, or the path of a transformer's config.json.
        revision: On the hub.

    Returns:
        The transformer's and the autoencoder's; the latter is empty where it is not known.

    Raises:
        ValueError: There is no such model.
    """
    path = Path(model)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8")), {}
    if model == EMBEDDED or path.is_dir():
        folder = EMBEDDED_DIR if model == EMBEDDED else path
        return ModelFolder(model).config, json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
    _require_id(model)
    try:
        files = [hf_hub_download(model, f"{part}/config.json", revision=revision) for part in ("transformer", "vae")]
    except Exception as error:
        raise ValueError(_not_given(model, error)) from error
    transformer, vae = (json.loads(Path(file).read_text(encoding="utf-8")) for file in files)
    return transformer, vae


def _local_dir(model: str, revision: str | None, variant: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    _require_id(model)
    try:
        # Takes the files the pipeline needs, the token of the login or of $HF_TOKEN, and the cache when offline.
        return Path(diffusers.DiffusionPipeline.download(model, revision=revision, variant=variant))
    except Exception as error:
        raise ValueError(_not_given(model, error)) from error


def _require_id(model: str) -> None:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"Model {model!r} is neither a folder here nor a hub id (owner/name) nor {EMBEDDED!r}.")


def _not_given(model: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"Model {model!r} is not a folder here and the hub did not give it ({reason}). Check the id and the revision, "
        "accept the licence and log in if it is gated (hf auth login), or give a local folder."
    )
