"""A model's folder in diffusers' layout, or its hub id: which family it is, and its components on demand.

Reads `model_index.json` and one subfolder a component. Components are loaded one at a time and freed by the caller;
the transformer can be had one block at a time.
"""

import copy
import ctypes
import gc
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from host.models import hub
from host.models.base import (
    ModelAdapter,
    PromptRequest,
    PromptStates,
    TransformerConfig,
    adapter_of,
    bare_pipeline,
    required_components,
    spatial_factor,
)
from host.models.files import open_weights, read_json, weight_files
from runtime.bundle import sha256_file

EMBEDDED = hub.EMBEDDED
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
        self.dir = _folder_of(model) or hub.snapshot(model, revision, variant)
        paths = self.dir / "model_index.json", self.dir / "transformer" / "config.json"
        for path in paths:
            if path.is_file():
                continue
            if path != paths[0] and "unet" in (index := read_json(paths[0])):
                raise ValueError(
                    f"{self.dir} is a UNet pipeline ({index.get('_class_name')}); PocketDiT trains diffusion transformers "
                    "such as SANA, FLUX or Stable Diffusion 3."
                )
            raise ValueError(
                f"{self.dir} is not a diffusion transformer in diffusers' layout: {path} is missing. Give a folder "
                f"with model_index.json and transformer/, a hub id, or {EMBEDDED!r}."
            )
        self._index, self.config = map(read_json, paths)
        if "_class_name" not in self.config:
            raise ValueError(f"{paths[1]} has no '_class_name'. Download or save the model again.")
        self.adapter = adapter_of(self.config["_class_name"], model)
        self._hashes: dict[str, str] = {}
        self._given: dict[str, Any] = {}

    def with_components(self, **components: Any) -> "ModelFolder":
        """The same model with other components in place of those of its folder, e.g. a text encoder that learnt a token."""
        other = copy.copy(self)
        other._given = self._given | components
        return other

    @cached_property
    def normalized_config(self) -> TransformerConfig:
        """The configuration under the names all families share; what the file leaves out is diffusers' default."""
        return self.adapter.normalized_config(SimpleNamespace(**self.skeleton().config))

    @cached_property
    def latent_factor(self) -> int:
        """Pixels per latent along one side, from the autoencoder's configuration alone."""
        kind, path = self._kind("vae"), self.dir / "vae" / "config.json"
        config = read_json(path)
        with _blaming(path), torch.device("meta"):
            vae = kind.from_config(config).eval()
        return spatial_factor(vae, self.normalized_config.num_channels)

    def components(self) -> list[str]:
        """Names of the components model_index.json gives a class to, sorted."""
        named = {name for name, entry in self._index.items() if isinstance(entry, list) and all(entry)}
        return sorted(named | {"transformer"})

    def require_whole(self) -> None:
        """Checks what can be checked of all components without reading weights: files, configurations, headers, shapes.

        Raises:
            ValueError: Names the component, the file, and what to do.
        """
        for component in required_components(self.adapter.pipeline):
            kind, folder = self._kind(component), self.dir / component
            for path in sorted(folder.glob("*config.json")):
                read_json(path)
            # Encoders and autoencoders may come as .bin: their own libraries load them.
            is_model = inspect.isclass(kind) and issubclass(kind, nn.Module)
            if component != "transformer" and is_model and not any(folder.glob("*.bin")):
                for path in set(weight_files(folder, self._variant_of(component)).values()):
                    open_weights(path)
        self._require_fit()

    def _require_fit(self) -> None:
        """Refuses a transformer whose files hold other tensors than its configuration makes."""
        skeleton = self.skeleton()
        wanted = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        stacks = tuple({f"{block.module.rpartition('.')[0]}." for block in self.adapter.blocks(skeleton)})
        if more := [name for name in self._weight_files if name not in wanted and name.startswith(stacks)]:
            raise ValueError(
                f"{self.dir}/transformer: the weights have {more[0]} and {len(more) - 1} more, which config.json does not "
                "make. They belong to different models; get both from the same place."
            )
        for path, names in self._by_file("", list(wanted)).items():
            with open_weights(path) as file:
                held = set(file.keys())
                for name in names:
                    got = tuple(file.get_slice(name).get_shape()) if name in held else None
                    if got != wanted[name]:
                        raise ValueError(
                            f"{path}: {name} is {got}, {self.dir / 'transformer'}/config.json makes it {wanted[name]}. "
                            "They belong to different models; get both from the same place."
                        )

    def skeleton(self) -> Any:
        """The transformer on the meta device: modules and shapes from the configuration alone, no weights."""
        with _blaming(self.dir / "transformer" / "config.json"):
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
        trim_heap()

    def _fill(self, module: nn.Module, prefix: str, names: Sequence[str], device: torch.device | str) -> None:
        state: dict[str, Tensor] = {}
        for path, own in self._by_file(prefix, names).items():
            with open_weights(path) as file:
                state |= {name: file.get_tensor(prefix + name).to(device, torch.float32) for name in own}
        try:
            module.load_state_dict(state, strict=False, assign=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(
                f"{self.dir}/transformer: the weights do not fit config.json ({prefix}{reason}). They belong to different "
                "models; get both from the same place."
            ) from None

    def _by_file(self, prefix: str, names: Sequence[str]) -> dict[Path, list[str]]:
        """The transformer's tensors `prefix` + `names`, by the file that holds them."""
        files = self._weight_files
        if missing := [name for name in names if prefix + name not in files]:
            raise ValueError(
                f"{self.dir}/transformer: the weights lack {prefix}{missing[0]} and {len(missing) - 1} more. The "
                "configuration and the weights belong to different models; get both from the same place."
            )
        grouped: dict[Path, list[str]] = {}
        for name in names:
            grouped.setdefault(files[prefix + name], []).append(name)
        return dict(sorted(grouped.items()))

    @cached_property
    def _weight_files(self) -> dict[str, Path]:
        return weight_files(self.dir / "transformer", self.variant)

    @torch.no_grad()
    def encode_prompts(
        self, prompts: Sequence[str], *, max_tokens: int | None = None, negative: bool = False, blank: bool = False
    ) -> PromptStates:
        """Prompts to prompt states, see `ModelAdapter.encode_prompts`; the encoders are freed again."""
        request = PromptRequest(
            texts=list(prompts), config=self.normalized_config, max_tokens=max_tokens, negative=negative, blank=blank
        )
        states = self.adapter.encode_prompts(self.load, request)
        if not blank:
            gc.collect()
            trim_heap()
            self._require_width(states, request)
        return states

    def _require_width(self, states: PromptStates, request: PromptRequest) -> None:
        wanted = self.adapter.encode_prompts(self.load, replace(request, blank=True))
        for name, got, want in (
            ("states", states.states, wanted.states),
            ("pooled states", states.pooled, wanted.pooled),
        ):
            if got is not None and want is not None and got.shape[-1] != want.shape[-1]:
                raise ValueError(
                    f"{self.dir}: the text encoders give {name} {got.shape[-1]} wide, the transformer takes "
                    f"{want.shape[-1]}. They belong to different models; get text encoders and transformer from the same place."
                )

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

    def adapter_files(self) -> list[str]:
        """Source files of the adapter and of what it shares with other families: they are part of the cache keys."""
        own = inspect.getmodule(type(self.adapter))
        shared = [m for m in vars(own).values() if inspect.ismodule(m) and m.__name__.startswith(f"{__package__}.")]
        sources: list[Any] = [ModelAdapter, type(self.adapter), *shared]
        return sorted({inspect.getfile(source) for source in sources})

    def load(self, component: str) -> Any:
        """Loads one component (`transformer`, `vae`, `text_encoder`, `tokenizer`, `scheduler`), ready for inference.

        Raises:
            ValueError: model_index.json does not name it, or names code outside diffusers, transformers and PocketDiT; or
                its folder is missing or broken.
        """
        if component in self._given:
            return self._given[component]
        kind, variant = self._kind(component), self._variant_of(component)
        with _blaming(self.dir / component):
            loaded = kind.from_pretrained(self.dir, subfolder=component, **({"variant": variant} if variant else {}))
        if isinstance(loaded, nn.Module):
            if any(parameter.dtype != torch.float32 for parameter in loaded.parameters()):
                loaded = loaded.to(torch.float32)
            loaded.eval().requires_grad_(False)
        return loaded

    def _kind(self, component: str) -> Any:
        """The class of a component whose folder is there."""
        entry, index_path = self._index.get(component), self.dir / "model_index.json"
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
            raise ValueError(
                f"{index_path} names no {component!r}; {self.adapter.pipeline.__name__} has one. Save the whole pipeline."
            )
        library, class_name = entry
        if not any(library == allowed or library.startswith(f"{allowed}.") for allowed in COMPONENT_LIBRARIES):
            raise ValueError(
                f"{self.dir}: {component} wants code from {library!r}; only {COMPONENT_LIBRARIES} are imported."
            )
        folder = self.dir / component
        # The embedded model's text side comes from an installed package.
        if not library.startswith("host.") and not (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(f"{folder} is missing or empty. Download or save the model again, with its {component}.")
        with _blaming(index_path):
            return getattr(importlib.import_module(library), class_name)

    def _variant_of(self, component: str) -> str | None:
        """The variant where the component has one; like diffusers, the others come as they are."""
        has_it = component == "transformer" or any((self.dir / component).glob(f"*.{self.variant}[.-]*"))
        return self.variant if has_it else None

    def sha256(self, component: str | None = None) -> str:
        """Hash over the configuration and weights of a component, or of all that model_index.json names."""
        if component is None:
            parts = [f"{name} {self.sha256(name)}" for name in self.components()]
            return hashlib.sha256("\n".join([str(self._index.get("_class_name")), *parts]).encode()).hexdigest()
        if component not in self._hashes:
            digest = hashlib.sha256(json.dumps(self._index.get(component)).encode())
            for path in sorted((self.dir / component).glob("*")):
                if path.is_file():
                    digest.update(f"{path.name} {sha256_file(path)}\n".encode())
            self._hashes[component] = digest.hexdigest()
        return self._hashes[component]


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Whatever a library raises inside is said of `path`."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{path} cannot be loaded ({type(error).__name__}: {reason}). Download or save the model again."
        ) from error


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def trim_heap() -> None:
    """Gives freed memory back: glibc keeps it, and SANA-1.6B grew by 153 MiB a block (3512 MiB at its end, 1168 so)."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


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
        return read_json(path), {}
    if folder := _folder_of(model):
        transformer, vae_path = ModelFolder(model).config, folder / "vae" / "config.json"
        if not vae_path.is_file():
            raise ValueError(
                f"{vae_path} is missing, which says how large a latent is. Get the folder vae/, or give "
                f"{folder / 'transformer' / 'config.json'} alone to plan with the family's own autoencoder."
            )
        return transformer, read_json(vae_path)
    transformer_path, vae_path = hub.config_paths(model, revision, ("transformer", "vae"))
    return read_json(transformer_path), read_json(vae_path)


def _folder_of(model: str) -> Path | None:
    if model == EMBEDDED:
        return EMBEDDED_DIR
    return Path(model) if Path(model).is_dir() else None
