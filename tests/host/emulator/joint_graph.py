"""What PocketDiT does not do: forward and backward of all blocks in one program, weights inside it as constants.

`export_joint` writes it, `run` is a workload of the emulator that trains with it. Blocks are of SANA-0.6B's width.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from runtime.programs import portable_lib  # here, so that it is idle memory as it is of the product's loop

WIDTH, INNER, TOKENS, RANK = 1152, 5760, 64, 4
FILE_NAME = "joint.pte"
LINEARS = {
    **{name: (WIDTH, WIDTH) for name in ("q", "k", "v", "out", "cross_q", "cross_k", "cross_v", "cross_out")},
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER // 2),
}


def export_joint(path: Path, num_blocks: int) -> int:
    """Writes the program and returns the bytes of its weights."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    weights = [{name: random(*shape) for name, shape in LINEARS.items()} for _ in range(num_blocks)]
    lora = [random(*shape) for _ in weights for o, i in LINEARS.values() for shape in ((RANK, i), (o, RANK))]

    def step(hidden: torch.Tensor, context: torch.Tensor, *lora: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [value.detach().requires_grad_(True) for value in lora]
        pairs = iter(zip(leaves[::2], leaves[1::2], strict=True))
        for block in weights:

            def linear(name: str, x: torch.Tensor, block: dict[str, torch.Tensor] = block) -> torch.Tensor:
                down, up = next(pairs)
                return torch.mm(x, block[name].t()) + torch.mm(torch.mm(x, down.t()), up.t())

            def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return torch.mm((torch.mm(q, k.t()) / math.sqrt(WIDTH)).softmax(-1), v)

            q, k, v = (linear(name, hidden) for name in ("q", "k", "v"))
            hidden = hidden + linear("out", attention(q, k, v))
            q, k, v = linear("cross_q", hidden), linear("cross_k", context), linear("cross_v", context)
            hidden = hidden + linear("cross_out", attention(q, k, v))
            value, gate = linear("up", hidden).chunk(2, -1)
            hidden = hidden + linear("down", value * gate * torch.sigmoid(gate))
        loss = hidden.square().mean()
        return (loss, *torch.autograd.grad(loss, leaves))

    examples = (random(TOKENS, WIDTH), random(TOKENS, WIDTH), *lora)
    graph = make_fx(step)(*examples)
    with torch.no_grad():
        program = torch.export.export(graph, examples, strict=False)
    edge = to_edge_transform_and_lower(
        program, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    path.write_bytes(edge.to_executorch().buffer)
    return 4 * sum(value.numel() for block in weights for value in block.values())


def run(job: Any) -> dict[str, Any]:
    """Takes as many steps as asked for."""
    job.at("load", 0, None)
    module = portable_lib._load_for_executorch(str(Path(job.spec["bundle"]) / FILE_NAME))
    meta = module.method_meta("forward")
    shapes = [tuple(meta.input_tensor_meta(number).sizes()) for number in range(meta.num_inputs())]
    inputs = tuple(0.01 * torch.randn(shape) for shape in shapes)
    for step in range(1, job.spec["settings"]["steps"] + 1):
        job.at("forward", step, None)
        module.run_method("forward", inputs)
    return {"status": "complete"}
