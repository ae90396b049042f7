"""Maps a safetensors file and hands out tensors that point into the map, without a copy; writes such files.

The safetensors library maps files too, but keeps the map to itself; the runtime has to advise the kernel about it
(`POPULATE_READ` ahead of a block, `DONTNEED` after it), so it maps the file itself. The format is 8 bytes of header length,
a JSON header, then the data. Files are written here too because the library orders metadata at random: the same adapter
should be the same bytes.
"""

import contextlib
import ctypes
import json
import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.atomic import atomic_path
from runtime.errors import BundleError

LIBC = ctypes.CDLL(None)
KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
MADV_POPULATE_READ = 22
"""Reads and maps pages; Python 3.11's mmap does not name it."""
POPULATES_WELL = (5, 18)
"""From this kernel on it reads 2 MiB at a time where huge pages are allowed, one such piece ahead."""
READ_AHEAD_BYTES = 128 * 1024
"""Linux reads no more than its read-ahead size (128 KiB by default) for one request, however long."""
TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
}


class TensorFile:
    """A mapped safetensors file.

    Attributes:
        path: Where it lies.
        size_bytes: Size of the file.
        metadata: The header's string pairs.
    """

    def __init__(self, path: Path) -> None:
        """Maps `path`.

        Raises:
            BundleError: The file is missing, truncated, or not safetensors.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                # A private writable map: torch wants writable memory, nobody writes, so no page is ever copied.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, ValueError) as error:
            raise BundleError(f"{path}: {error}. Export the bundle again.") from None
        self.size_bytes = len(self._map)
        self._data_start = 8 + int.from_bytes(self._map[:8], "little")
        try:
            header: dict[str, Any] = json.loads(self._map[8 : self._data_start])
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BundleError(f"{path} is not a safetensors file ({error}). Export the bundle again.") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries = header
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if self._data_start + end != self.size_bytes:
            raise BundleError(
                f"{path}: {self.size_bytes} bytes, its header promises {self._data_start + end}. Export the bundle again."
            )

    def names(self) -> list[str]:
        """Tensor names in the order of their bytes in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"][0])

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype name and shape of a tensor."""
        entry = self._entry(name)
        return DTYPE_NAMES[TORCH_DTYPES[entry["dtype"]]], tuple(entry["shape"])

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, pointing into the map."""
        entry = self._entry(name)
        start, end = entry["data_offsets"]
        dtype = TORCH_DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        raw = np.frombuffer(self._map, np.uint8, end - start, self._data_start + start)
        return torch.from_numpy(raw).view(dtype).view(entry["shape"])

    def will_need(self) -> None:
        """Reads the whole file into the page cache and maps it, in pages as large as its file system has; older kernels are
        asked to read it ahead in pages of 4 KiB, which takes them several times the processor time. Blocks, without holding the
        interpreter."""
        if KERNEL >= POPULATES_WELL and self._populate():
            return
        with self.path.open("rb") as file:
            for start in range(0, self.size_bytes, READ_AHEAD_BYTES):
                os.posix_fadvise(file.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def _populate(self) -> bool:
        """Whether the kernel could; through ctypes, as `mmap.madvise` holds the interpreter."""
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return not LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size_bytes), MADV_POPULATE_READ)

    def release(self, *, forget: bool = False) -> None:
        """Lets the kernel drop the mapped pages, and if `forget` has it drop them now. They stay valid: the next access reads
        them again."""
        self._map.madvise(mmap.MADV_DONTNEED)
        if forget:
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            raise BundleError(f"{self.path} has no tensor {name!r}; it has {', '.join(self.names()[:8])} ...")
        return self._entries[name]


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file atomically; the same content gives the same bytes."""
    header, offsets, _ = layout_header({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, metadata)
    with atomic_path(path) as temp, temp.open("wb") as file:
        file.write(header)
        for name in sorted(offsets, key=lambda name: offsets[name]):
            file.write(tensor_bytes(tensors[name]))


def tensor_bytes(value: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major, without a copy if it is contiguous."""
    array: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def tensors_crc32(tensors: Mapping[str, torch.Tensor]) -> int:
    """CRC-32 over the bytes of all tensors, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensor_bytes(tensors[name]), crc)
    return crc


def layout_header(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header, each tensor's position in the file, and the file's size. Widest dtypes first, so that
    every tensor is aligned to its own element."""
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name in names:
        dtype, shape = layout[name]
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + entries[name]["data_offsets"][0] for name in names}
    return struct.pack("<Q", len(text)) + text, offsets, start + position
