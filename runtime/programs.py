"""Calls the block programs. The only file of the runtime that touches ExecuTorch's Python binding (pinned: experimental).

Reads `programs.pte`. Inputs are passed as pointers: weights stay in the map they came from.
"""

import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping

import torch

from runtime.bundle import Bundle
from runtime.errors import ContractError
from runtime.manifest import MethodSpec
from runtime.tensor_file import DTYPE_NAMES


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes what ExecuTorch announces while it loads: that its API is experimental (it is pinned), and, straight to file
    descriptor 2, which processor files it could not read. Errors are raised, not printed."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    previous = logging.root.manager.disable
    try:
        os.dup2(null, 2)
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
        logging.disable(previous)


with _quiet():
    from executorch.extension.pybindings import portable_lib


SHARED_FLOPS = 2e8


class BlockPrograms:
    """The methods of a bundle's program file.

    Attributes:
        methods: Their contracts by name.
    """

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        """Loads the program.

        Args:
            bundle: Names the file and the contract of each method.
            threads: Size of the thread pool.

        Raises:
            ContractError: The file's methods are not those of the manifest.
        """
        path = bundle.path(bundle.manifest.programs.file)
        torch.set_num_threads(threads)  # matrix products run on torch's BLAS
        with _quiet():
            portable_lib._unsafe_reset_threadpool(threads)
            self._module = portable_lib._load_for_executorch(str(path))
        self.methods = bundle.manifest.programs.methods
        for name, spec in self.methods.items():
            if name not in self._module.method_names():
                raise ContractError(f"{path}: method {name!r} of the manifest is missing. Export the bundle again.")
            meta = self._module.method_meta(name)
            got = [tuple(meta.input_tensor_meta(i).sizes()) for i in range(meta.num_inputs())]
            if got != [tensor.shape for tensor in spec.inputs]:
                raise ContractError(
                    f"{path}: input shapes of {name!r} differ from the manifest's. Export the bundle again."
                )

    def call(self, method: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs a method.

        Args:
            method: e.g. `sana_block_forward`.
            inputs: By the names of the manifest; names the method does not take are ignored.

        Returns:
            Outputs by name. They lie in the method's arena: valid until the same method is called again.

        Raises:
            ContractError: An input is missing or has another dtype or shape than the manifest states.
        """
        spec = self.methods[method]
        outputs = self._module.run_method(method, arguments(method, spec, inputs), clone_outputs=False)
        return {tensor.name: value for tensor, value in zip(spec.outputs, outputs, strict=True)}


def default_threads(bundle: Bundle) -> int:
    """All cores for blocks worth sharing; one thread below 0.2 GFLOP a call, where waiting for each other costs more."""
    methods = bundle.manifest.programs.methods
    inputs = methods[f"{bundle.manifest.blocks[0].kind}_forward"].inputs
    num_tokens = next(spec.shape[0] for spec in inputs if spec.role == "state")
    flops = 2 * num_tokens * sum(math.prod(spec.shape) for spec in inputs if spec.role == "weight")
    return len(os.sched_getaffinity(0)) if flops >= SHARED_FLOPS else 1


def arguments(method: str, spec: MethodSpec, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The inputs in call order, each checked against the contract; ExecuTorch itself would misread memory."""
    values = []
    for tensor in spec.inputs:
        value = inputs.get(tensor.name)
        if value is None:
            raise ContractError(f"{method}: input {tensor.name!r} is missing.")
        if tensor.rows is not None:
            value = value[slice(*tensor.rows)].unsqueeze(0)
        if (DTYPE_NAMES.get(value.dtype), tuple(value.shape)) != (
            tensor.dtype,
            tensor.shape,
        ) or not value.is_contiguous():
            raise ContractError(
                f"{method}: input {tensor.name!r} is {value.dtype} {list(value.shape)} "
                f"{'' if value.is_contiguous() else '(not contiguous) '}, expected {tensor.dtype} {list(tensor.shape)}. "
                "The sample store and the programs belong to different bundles."
            )
        values.append(value)
    return tuple(values)
