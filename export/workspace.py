"""The private memory a program file takes beside its planned arenas: XNNPACK's workspace, which no planner reports.

`predict` lays out a graph as XNNPACK's planner does; `measure` runs every method once on zeros, in a process of its own:
`python -m export.workspace PROGRAMS.pte SPEC.json`.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph, Node

from runtime.errors import ExportError
from runtime.manifest import ProgramSpec
from runtime.memory import memory_bytes
from runtime.programs import portable_lib
from runtime.schema import decode, encode

IN_PLACE = frozenset(
    (
        "add",
        "sub",
        "mul",
        "neg",
        "tanh",
        "sigmoid",
        "rsqrt",
        "exp",
        "relu",
        "clamp",
        "floor",
        "_softmax",
        "view",
        "_unsafe_view",
    )
)
"""Operators whose output takes the memory of an input that nothing else reads."""
CAST = torch.ops.aten._to_copy.default
"""Not XNNPACK's: what it makes of weights of 16 bits lies in the method's own arena."""
ALIGNMENT = 64
PACKED_COLUMNS = 16
"""XNNPACK packs the second operand of a product into panels of this many columns (x86; 8 on ARM), with a row of zeros for
the bias, each time it runs."""


def predict(graph: Graph) -> int:
    """Bytes of workspace of an exported method that is one XNNPACK graph; nothing is lowered or run.

    Lays out the intermediate results and packed operands like XNNPACK's planner (src/memory-planner.c, in-place rules of
    src/runtime.c): the largest first, each into the smallest gap between those alive at the same time, but never into the
    gap before the first. FLUX.1-dev's single block takes 230 MiB so, where 149 MiB would do; newer versions fill that gap.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    outside = {*graph.output_node().all_input_nodes, *graph.find_nodes(op="call_function", target=CAST)}
    inner = [node for node in graph.nodes if tensor_bytes(node) and node not in outside]
    last = {node: max(order[user] for user in node.users) for node in inner}
    owner: dict[Node, Node] = {}
    for node in inner:
        owner[node] = node
        if node.target._schema.name.split("::")[1] not in IN_PLACE or len(node.users) != 1:
            continue
        for source in node.all_input_nodes:
            if source in owner and len(source.users) == 1 and tensor_bytes(source) == tensor_bytes(node):
                owner[node] = owner[source]
                last[owner[source]] = last[node]
                break
    needed = [(tensor_bytes(node), order[node], last[node]) for node in inner if owner[node] is node]
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        batch, rows, columns = node.args[1].meta["val"].shape
        packed = 4 * batch * (rows + 1) * -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS
        needed.append((packed, order[node], order[node]))
    placed: list[tuple[int, int, int, int]] = []
    total = 0
    for exact, start, end in sorted(needed, key=lambda need: -need[0]):
        size = -(-exact // ALIGNMENT) * ALIGNMENT
        offset = _offset([(low, high) for low, high, first, final in placed if first <= end and start <= final], size)
        placed.append((offset, offset + size, start, end))
        total = max(total, offset + size)
    return total


def _offset(alive: list[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between the ranges that are alive that takes `size` bytes, else their end."""
    merged: list[list[int]] = []
    for low, high in sorted(alive):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    gaps = [(after[0] - before[1], before[1]) for before, after in itertools.pairwise(merged)]
    fits = [gap for gap in gaps if gap[0] >= size]
    return min(fits)[1] if fits else merged[-1][1] if merged else 0


def cast_bytes(graph: Graph) -> int:
    """What a method casts outside XNNPACK; all of it is in its arena at a time."""
    return sum(tensor_bytes(node) for node in graph.find_nodes(op="call_function", target=CAST))


def tensor_bytes(node: Node) -> int:
    """Size of what a node of a graph computes; 0 for inputs."""
    value = node.meta.get("val")
    return int(value.nbytes) if node.op == "call_function" and isinstance(value, Tensor) else 0


def measure(path: Path, spec: ProgramSpec) -> int:
    """Bytes of workspace of a program file, 0 without XNNPACK.

    Raises:
        ExportError: A method does not run.
    """
    if spec.backend != "xnnpack":
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(encode(spec), file)
        file.flush()
        command = [sys.executable, "-m", "export.workspace", str(path), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise ExportError(f"{path.name} does not run on zeros: {done.stderr.strip()[-500:]}")
    return int(done.stdout.splitlines()[-1])


def _measured(path: Path, spec: ProgramSpec) -> int:
    # Zeros from calloc are never touched: reading them takes no private memory.
    inputs = {
        name: [torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in method.inputs]
        for name, method in spec.methods.items()
    }
    start = memory_bytes()[0]
    module = portable_lib._load_for_executorch(str(path))
    # The largest first: the workspace grows in place of being freed and taken anew.
    for name in sorted(spec.methods, key=lambda name: -spec.methods[name].workspace_bytes):
        module.run_method(name, inputs[name], clone_outputs=False)
    return max(0, memory_bytes()[0] - start - sum(method.planned_bytes for method in spec.methods.values()))


if __name__ == "__main__":
    portable_lib._unsafe_reset_threadpool(1)
    print(_measured(Path(sys.argv[1]), decode(ProgramSpec, json.loads(Path(sys.argv[2]).read_text()), sys.argv[2])))
