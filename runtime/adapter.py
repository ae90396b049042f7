"""The trained LoRA: one flat vector while training, an ordinary PEFT-format file for `load_lora_weights` afterwards.

Reads the bundle's `lora_init.safetensors`, writes `adapter.safetensors`.
"""

import json
import math
from pathlib import Path

import torch

from runtime.bundle import Bundle
from runtime.errors import NonFiniteLossError
from runtime.manifest import BundleManifest
from runtime.tensor_file import TensorFile, write_tensor_file


class LoraParameters:
    """LoRA matrices of all middle blocks as views into one flat vector, so the optimizer and the programs share memory.

    Attributes:
        flat: (P,) float32, all parameters.
        gradient: (P,) float32, their gradient.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Starts from the initial values the bundle carries: the phone draws no random numbers."""
        init = TensorFile(bundle.path(bundle.manifest.lora.init_file))
        self._modules = [block.module for block in bundle.manifest.blocks]
        methods = bundle.manifest.programs.methods
        names = [
            (position, spec.name, spec.shape)
            for position, block in enumerate(bundle.manifest.blocks)
            for spec in methods[f"{block.kind}_forward"].inputs
            if spec.role == "lora"
        ]
        self._spans: dict[tuple[int, str], tuple[int, int, tuple[int, ...]]] = {}
        end = 0
        for position, name, shape in names:
            start, end = end, end + torch.Size(shape).numel()
            self._spans[position, name] = (start, end, shape)
        self.flat = torch.empty(end)
        self.gradient = torch.zeros(end)
        for position, name, _ in names:
            self.view(position, name).copy_(init.tensor(f"{self._modules[position]}.{name}.weight"))

    def view(self, position: int, name: str) -> torch.Tensor:
        """The matrix `name` (e.g. `attn1.to_q.lora_A`) of the block at `position`; writing to it trains it."""
        start, end, shape = self._spans[position, name]
        return self.flat[start:end].view(shape)

    def block_inputs(self, position: int) -> dict[str, torch.Tensor]:
        """Program inputs of the block at `position`."""
        return {name: self.view(position, name) for at, name in self._spans if at == position}

    def add_gradient(self, position: int, name: str, value: torch.Tensor, scale: float) -> None:
        """Adds `scale * value` to the gradient of a matrix."""
        start, end, _ = self._spans[position, name]
        self.gradient[start:end].add_(value.reshape(-1), alpha=scale)

    def named(self) -> dict[str, torch.Tensor]:
        """All matrices by their name in the base model, e.g. `transformer_blocks.4.attn1.to_q.lora_A.weight`."""
        return {f"{self._modules[position]}.{name}.weight": self.view(position, name) for position, name in self._spans}


def save_adapter(path: Path, lora: LoraParameters, manifest: BundleManifest, *, steps: int, version: str) -> None:
    """Writes the adapter in PEFT's format, with what diffusers needs to rebuild rank and alpha in its metadata.

    Raises:
        NonFiniteLossError: A weight is NaN or infinite; nothing is written.
    """
    # The largest magnitude is NaN or infinite if any is; `isfinite` would take a copy of all of them.
    if not math.isfinite(float(torch.linalg.vector_norm(lora.flat, math.inf))):
        raise NonFiniteLossError(
            f"{path} was not written: the adapter has NaN or infinite weights. Lower the learning rate."
        )
    spec = manifest.lora
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in lora.named()})
    # diffusers reads this key to rebuild peft.LoraConfig; without it alpha is taken to equal the rank.
    peft_config = {
        f"{spec.prefix}.r": spec.rank,
        f"{spec.prefix}.lora_alpha": spec.alpha,
        f"{spec.prefix}.target_modules": modules,
    }
    metadata = {
        "format": "pt",
        "lora_adapter_metadata": json.dumps(peft_config, sort_keys=True),
        "pocketdit.version": version,
        "pocketdit.base": manifest.base.model,
        "pocketdit.base_sha256": manifest.base.sha256,
        "pocketdit.cut": f"{manifest.cut.head},{manifest.cut.tail}",
        "pocketdit.rank": str(spec.rank),
        "pocketdit.alpha": str(spec.alpha),
        "pocketdit.instance_prompt": manifest.subject.instance_prompt,
        "pocketdit.steps": str(steps),
    }
    tensors = {
        f"{spec.prefix}.{name}": value[..., None, None] if name.rsplit(".lora_", 1)[0] in spec.convolutions else value
        for name, value in lora.named().items()
    }
    write_tensor_file(path, tensors, metadata)
