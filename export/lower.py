"""Lowers exported methods to one ExecuTorch program file. The only file that touches `executorch.exir` (pinned).

Writes `programs.pte`; refuses operators the runtime does not have, by name, before anything runs on a phone.
"""

import contextlib
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from executorch.backends.xnnpack import _passes as xnnpack_passes
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from torch.fx.traceback import NodeSource

from export.block_programs import Method, flops
from export.workspace import predict
from runtime import atomic
from runtime.errors import ExportError
from runtime.manifest import MethodSpec, ProgramSpec
from runtime.programs import portable_lib

Backend = Literal["xnnpack", "portable"]
VERSION = metadata.version("executorch")
FILE_NAME = "programs.pte"
MAX_PROGRAM_BYTES = 1_000_000

# Called by ExecuTorch itself; they need no kernel.
BUILT_IN = ("executorch_call_delegate", "executorch_prim::", "_operator::")


def lower(methods: Mapping[str, Method], path: Path, backend: Backend) -> ProgramSpec:
    """Writes all methods into one program file.

    Args:
        methods: Exported graphs by method name.
        path: The `.pte` to write.
        backend: `xnnpack` hands element-wise chains and products of two inputs to XNNPACK; `portable` uses the built-in
            kernels only.

    Returns:
        The file's description for the manifest, planned bytes per method included.

    Raises:
        ExportError: An operator has no kernel in the runtime, or the program holds more than code.
    """
    with _quiet(), _shared_provenance(), _imports_uncollected():
        edge = delegated(methods, backend)
        for name, method in methods.items():
            _require_kernels(name, method, edge.exported_program(name))
        lowered = edge.to_executorch(
            # With planned inputs every call would copy the weights into the arena.
            ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))
        )
    if len(lowered.buffer) > MAX_PROGRAM_BYTES:
        raise ExportError(
            f"{path.name} is {len(lowered.buffer)} bytes, more than {MAX_PROGRAM_BYTES}: a weight was captured as a constant."
        )
    atomic.write_bytes(path, lowered.buffer)
    planned = {plan.name: sum(plan.non_const_buffer_sizes) for plan in lowered.executorch_program.execution_plan}
    return ProgramSpec(
        file=path.name,
        backend=backend,
        methods={
            name: MethodSpec(
                inputs=method.inputs,
                outputs=method.outputs,
                planned_bytes=planned[name],
                workspace_bytes=predict(method.program.graph) if backend == "xnnpack" else 0,
                flops=flops(method.program.graph),
            )
            for name, method in methods.items()
        },
    )


def delegated(methods: Mapping[str, Method], backend: Backend) -> EdgeProgramManager:
    """The methods in ExecuTorch's edge dialect, what the backend takes handed to it."""
    programs = {name: method.program for name, method in methods.items()}
    # The graphs hold gradients, which are outside the core ATen set that this validity check knows. Nothing in them has to be
    # kept from being decomposed, so they are decomposed once, not three times as `to_edge_transform_and_lower` does.
    edge = to_edge(programs, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    if backend == "portable":
        return edge
    with _passes_that_apply():
        return edge.to_backend(XnnpackPartitioner())


def runtime_operators() -> frozenset[str]:
    """Names of the kernels registered in the runtime, e.g. `aten::mm.out`."""
    return frozenset(portable_lib._get_operator_names())


def operator_counts(methods: Mapping[str, Method]) -> dict[str, Counter[str]]:
    """How often each operator stands in each exported graph, for tests and for reading."""
    return {
        name: Counter(str(node.target) for node in method.program.graph.nodes if node.op == "call_function")
        for name, method in methods.items()
    }


def _require_kernels(name: str, method: Method, program: torch.export.ExportedProgram) -> None:
    """Refuses operators without a kernel before anything runs on a phone.

    Raises:
        ExportError: Names each operator and the line of model code it comes from.
    """
    stems = {kernel.rsplit(".", 1)[0] for kernel in runtime_operators()}
    faults = set()
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema and not schema.name.startswith(BUILT_IN) and schema.name not in stems:
            faults.add(f"{schema.name}.{schema.overload_name or 'default'} in {method.source_of(node)}")
    if faults:
        raise ExportError(
            f"{name}: the ExecuTorch runtime has no kernel for {'; '.join(sorted(faults))}. Write the operation with "
            "others, as export/ops.py does for silu, attention and padding."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lowering logs a page per method and warns of its own deprecations."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def _shared_provenance() -> Iterator[None]:
    """Each of some sixty passes notes on each node which node of the graph before it came from, and copies all notes before;
    they never change, so one copy serves."""
    NodeSource.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del NodeSource.__deepcopy__  # type: ignore[attr-defined]


@contextlib.contextmanager
def _passes_that_apply() -> Iterator[None]:
    """XNNPACK runs 17 passes over what it takes, each traces all of it anew. These five can change our graphs; the others look
    for constant weights, which ours take as inputs, for observers of quantization, and for interpolation and attention as
    one operator."""
    kept = [
        xnnpack_passes.XNNPACKRemoveCloneOpsTransform,
        xnnpack_passes.DimOrderOpsRevertPass,
        xnnpack_passes.DecomposeConcatenate,
        xnnpack_passes.ChannelsLastTaggedReshapePass,
        xnnpack_passes.RemoveRedundantCopyPass,
    ]
    manager = xnnpack_preprocess.XNNPACKPassManager
    xnnpack_preprocess.XNNPACKPassManager = lambda program, passes: manager(program, kept)
    try:
        yield
    finally:
        xnnpack_preprocess.XNNPACKPassManager = manager


@contextlib.contextmanager
def _imports_uncollected() -> Iterator[None]:
    """Lowering makes millions of objects, so the collector of cycles runs often; it need not walk over all that the imported
    libraries hold each time. Off altogether it is hardly faster and holds 445 MiB more for FLUX's double block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
