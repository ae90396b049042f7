"""The sample store: what a training step consumes, one record per patch sample. Reads and writes `samples-*.safetensors`.

A shard stacks its records: tensor `sample.<input name>` has shape (N, ...), and record i is the i-th slice, contiguous on
flash. Tensors that depend on the prompt alone are stored once per prompt, `prompt.<input name>` of shape (P, ...), with
`prompt_index` (N,). int8 tensors have a `<name>.scale` (N, tokens, 1) beside them. `crc32` (N,) covers the bytes of all
of a record's slices and of its prompt's, so that a record with another record's half is found out. The identities stand
in the header's metadata.

Keep in sync with android_demo's SampleStore.kt.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.atomic import atomic_path
from runtime.errors import BundleError
from runtime.schema import decode, encode
from runtime.tensor_file import TensorFile, layout_header, tensor_bytes, tensors_crc32

SCHEMA = "pocketdit.samples/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIdentity:
    """Where a record came from; stays with it from the photo to the step that consumes it."""

    index: int
    """Position in the whole pool."""
    photo: str
    photo_sha256: str
    crop: tuple[int, int, int, int]
    """Left, top and side in pixels of the prepared photo, and 1 if flipped."""
    prompt: str
    sigma: float
    timestep: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One record, cast to float32.

    Attributes:
        identity: Where it came from.
        tensors: Program inputs by name, without a batch axis.
        base_loss: Loss of the frozen base on this sample, computed when it was made.
        stored_bytes: Bytes read from flash for it.
    """

    identity: SampleIdentity
    tensors: dict[str, torch.Tensor]
    base_loss: float
    stored_bytes: int


class SampleStore:
    """Reads records from mapped shards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Opens shards.

        Raises:
            BundleError: A shard is not a sample store of this version, or indices are missing or doubled.
        """
        self._records: dict[int, tuple[TensorFile, int, SampleIdentity]] = {}
        for path in paths:
            file = TensorFile(path)
            if (got := file.metadata.get("schema")) != SCHEMA:
                raise BundleError(f"{path}: sample schema is {got!r}, this version reads {SCHEMA!r}. Export again.")
            for row, item in enumerate(json.loads(file.metadata["records"])):
                identity = decode(SampleIdentity, item, f"{path} record {row}")
                if identity.index in self._records:
                    raise BundleError(f"{path}: sample {identity.index} is there twice. Export the bundle again.")
                self._records[identity.index] = (file, row, identity)
        if sorted(self._records) != list(range(len(self._records))):
            raise BundleError(
                f"{paths[0].parent}: sample indices have gaps; a shard is missing. Export the bundle again."
            )

    def __len__(self) -> int:
        return len(self._records)

    def identity(self, index: int) -> SampleIdentity:
        """The identity of a record, without reading its tensors."""
        return self._records[index][2]

    def base_losses(self) -> list[float]:
        """The frozen base's loss on each sample, in pool order."""
        return [float(f.tensor("base_loss")[row]) for f, row, _ in (self._records[i] for i in range(len(self)))]

    def read(self, index: int) -> Sample:
        """Reads one record.

        Raises:
            BundleError: Its checksum is off.
        """
        file, row, identity = self._records[index]
        slices = _record_slices(file, row)
        if (got := tensors_crc32(slices)) != (stated := int(file.tensor("crc32")[row])):
            raise BundleError(f"{file.path}: sample {index} has CRC {got:08x}, stored is {stated:08x}. Export again.")
        tensors = {
            name.split(".", 1)[1]: _to_float(value, slices.get(f"{name}.scale"))
            for name, value in slices.items()
            if not name.endswith(".scale")
        }
        stored_bytes = sum(value.nbytes for value in slices.values())
        return Sample(identity, tensors, float(file.tensor("base_loss")[row]), stored_bytes)


class SampleStoreWriter:
    """Writes one shard; records may come in any order. Use as a context manager: the file appears when all are in."""

    def __init__(
        self,
        path: Path,
        identities: Sequence[SampleIdentity],
        prompt_index: Sequence[int],
        sample_specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        prompt_tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Lays out the shard.

        Args:
            path: The shard to write.
            identities: One per record, in row order.
            prompt_index: Row of each record's prompt in `prompt_tensors`.
            sample_specs: Stored dtype and shape (without N) of each per-sample input.
            prompt_tensors: Inputs that depend on the prompt alone, (P, ...) each.
        """
        count = len(identities)
        self._path = path
        self._rows = {identity.index: row for row, identity in enumerate(identities)}
        self._specs = dict(sample_specs)
        self._fixed: dict[str, torch.Tensor] = {
            "prompt_index": torch.tensor(list(prompt_index), dtype=torch.int32),
            "crc32": torch.zeros(count, dtype=torch.int64),
            "base_loss": torch.zeros(count, dtype=torch.float32),
            **{f"prompt.{name}": value.contiguous() for name, value in prompt_tensors.items()},
        }
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            n: (t.dtype, tuple(t.shape)) for n, t in self._fixed.items()
        }
        for name, (dtype, shape) in self._specs.items():
            layout[f"sample.{name}"] = (dtype, (count, *shape))
            if dtype == torch.int8:
                layout[f"sample.{name}.scale"] = (torch.float32, (count, *shape[:-1], 1))
        metadata = {"schema": SCHEMA, "records": json.dumps([encode(i) for i in identities], ensure_ascii=False)}
        self._header, self._offsets, self._size = layout_header(layout, metadata)
        self._written: set[int] = set()
        self._squares = {name: [0.0, 0.0] for name in self._specs}

    def __enter__(self) -> "SampleStoreWriter":
        self._atomic = atomic_path(self._path)
        temp = self._atomic.__enter__()
        with temp.open("w+b") as file:
            file.write(self._header)
            file.truncate(self._size)
            file.flush()
            self._map = mmap.mmap(file.fileno(), self._size)
        return self

    def write(self, index: int, tensors: Mapping[str, torch.Tensor], base_loss: float) -> None:
        """Stores the record with pool position `index`; float tensors are converted to the stored dtype."""
        row = self._rows[index]
        assert tensors.keys() == self._specs.keys(), (sorted(tensors), sorted(self._specs))
        record: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in self._specs.items():
            value = tensors[name].detach().cpu()
            assert tuple(value.shape) == shape, (name, tuple(value.shape), shape)
            if dtype == torch.int8:
                record[f"sample.{name}"], record[f"sample.{name}.scale"] = quantise_per_token(value)
            else:
                record[f"sample.{name}"] = value.to(dtype)
        prompt_row = int(self._fixed["prompt_index"][row])
        prompts = {name: value[prompt_row] for name, value in self._fixed.items() if name.startswith("prompt.")}
        self._fixed["crc32"][row] = tensors_crc32(record | prompts)
        self._fixed["base_loss"][row] = base_loss
        for name, value in record.items():
            data = tensor_bytes(value)
            start = self._offsets[name] + row * len(data)
            self._map[start : start + len(data)] = data
        for name, sums in self._squares.items():
            stored = _to_float(record[f"sample.{name}"], record.get(f"sample.{name}.scale"))
            exact = tensors[name].detach().cpu().float()
            sums[0] += float((stored - exact).square().sum())
            sums[1] += float(exact.square().sum())
        self._written.add(index)

    def relative_errors(self) -> dict[str, float]:
        """What the stored types cost: L2 norm of the rounding error over that of the values, per tensor."""
        return {name: math.sqrt(error / total) if total else 0.0 for name, (error, total) in self._squares.items()}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            assert self._written == self._rows.keys(), (
                f"{len(self._rows) - len(self._written)} records were not written"
            )
            for name, value in self._fixed.items():
                data = tensor_bytes(value)
                self._map[self._offsets[name] : self._offsets[name] + len(data)] = data
            self._map.flush()
        self._map.close()
        self._atomic.__exit__(kind, error, trace)


def quantise_per_token(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one scale a token: value (..., D) -> int8 (..., D), scale (..., 1) float32."""
    scale = value.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (value.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def sample_order(count: int, seed: int) -> Iterator[int]:
    """Yields sample indices for ever, each pass over the pool in a new order.

    Fisher-Yates driven by SplitMix64 (Steele, Lea and Flood 2014), because it is a few lines in any language: the phone
    must visit the samples in the same order as the desktop. Keep in sync with android_demo's SampleOrder.kt.
    """
    mask = (1 << 64) - 1
    state = seed & mask
    while True:
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            state = (state + 0x9E3779B97F4A7C15) & mask
            mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
            chosen = (mixed ^ (mixed >> 31)) % (last + 1)
            order[last], order[chosen] = order[chosen], order[last]
        yield from order


def _record_slices(file: TensorFile, row: int) -> dict[str, torch.Tensor]:
    prompt_row = int(file.tensor("prompt_index")[row])
    slices = {name: file.tensor(name)[row] for name in file.names() if name.startswith("sample.")}
    return slices | {name: file.tensor(name)[prompt_row] for name in file.names() if name.startswith("prompt.")}


def _to_float(value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return value.float() if scale is None else value.float() * scale
