"""Streams block weights from flash: maps the file of one block at a time and asks for the next one ahead.

The pages are clean and file-backed, so the system may drop them at any moment; they never count as private memory.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.bundle import Bundle
from runtime.memory import available_bytes
from runtime.tensor_file import TensorFile


class WeightStream:
    """The frozen weights of the middle blocks, by position in the running order.

    Attributes:
        streamed_bytes: Weight bytes handed out so far.
        drops_behind: Whether blocks are dropped from the page cache after use: where memory cannot hold them all, the kernel
            would drop those that were read ahead.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Maps every block's file; mapping reads nothing but headers."""
        self._files = [TensorFile(bundle.path(block.file)) for block in bundle.manifest.blocks]
        self.streamed_bytes = 0
        self.drops_behind = sum(file.size_bytes for file in self._files) > available_bytes()
        self._ahead = ThreadPoolExecutor(1, "weights")

    def __len__(self) -> int:
        return len(self._files)

    def prefetch(self, position: int) -> None:
        """Has a block read ahead of its use, beside the computation; positions outside the stack are ignored."""
        if 0 <= position < len(self._files):
            self._ahead.submit(self._files[position].will_need)

    def acquire(self, position: int) -> dict[str, torch.Tensor]:
        """The weights of one block by name, pointing into the map: valid until `release`."""
        file = self._files[position]
        self.streamed_bytes += file.size_bytes
        return {name: file.tensor(name) for name in file.names()}

    def release(self, position: int, *, again: bool) -> None:
        """Lets the kernel drop the pages of a block; `again` says that this block is the next to be used."""
        self._files[position].release(forget=self.drops_behind and not again)
