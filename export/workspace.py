"""Measures the private memory a program file takes beside its planned arenas: XNNPACK's workspace, which no planner reports.

Runs every method once on zeros, in a process of its own: `python -m export.workspace PROGRAMS.pte SPEC.json`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from runtime.errors import ExportError
from runtime.manifest import ProgramSpec
from runtime.memory import memory_bytes
from runtime.programs import portable_lib
from runtime.schema import decode, encode


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
    for name in sorted(spec.methods, key=lambda name: -spec.methods[name].planned_bytes):
        module.run_method(name, inputs[name], clone_outputs=False)
    return max(0, memory_bytes()[0] - start - sum(method.planned_bytes for method in spec.methods.values()))


if __name__ == "__main__":
    portable_lib._unsafe_reset_threadpool(1)
    print(_measured(Path(sys.argv[1]), decode(ProgramSpec, json.loads(Path(sys.argv[2]).read_text()), sys.argv[2])))
