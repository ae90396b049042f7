"""Turns one block function per kind into two methods, and the loss into a third. Where a block becomes a program.

    <kind>_forward (conditioning, weights, lora, hidden)               -> hidden
    <kind>_backward(conditioning, weights, lora, hidden, grad_output)  -> grad_hidden, grad of each LoRA matrix
    loss           (conditioning, weights, hidden, tail_residual, target) -> loss, grad_hidden

Backward recomputes the block inside (checkpointing at block grain). Shapes are static; weights are inputs, so a program
is made once per kind, whatever the depth. Linear weights come in pieces of their rows, in the type they are stored in.
"""

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from export.ops import FrozenLinears, StoredWeight
from export.quantize import GROUPS, SCALE, is_linear, row_pieces
from runtime.errors import ExportError
from runtime.manifest import Role, TensorSpec
from runtime.tensor_file import DTYPE_NAMES

Tensors = Mapping[str, Tensor]
Weights = Mapping[str, Any]
"""Tensors by name; a linear layer's weight is a `StoredWeight`."""
BlockFunction = Callable[[Tensor, Tensors, Weights, FrozenLinears], Tensor]
"""(hidden (S, D), conditioning, weights, linear layers) -> hidden (S, D)."""
PredictFunction = Callable[[Tensor, Tensors, Weights], Tensor]
"""(hidden (T, D) of the image tokens after the last block, conditioning, weights) -> prediction, of the target's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKind:
    """What the programs of one kind of block are made from. The tensors are examples: their shapes and dtypes count."""

    name: str
    """Prefix of the methods, e.g. `sana_block`."""
    function: BlockFunction
    hidden: Tensor
    """(S, D) float32: image tokens, after the prompt's where a family's blocks carry both."""
    conditioning: Tensors
    weights: Tensors
    """As they are stored (export/quantize.py)."""
    lora: Tensors
    """`<layer>.lora_A` (R, I) and `<layer>.lora_B` (O, R)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHead:
    """What the `loss` method is made from: the base's output layers and an example target."""

    function: PredictFunction
    hidden: Tensor
    """(S, D) float32."""
    tail_residual: Tensor
    """(T, D) float32: the image tokens, the last T of the S."""
    conditioning: Tensors
    weights: Tensors
    target: Tensor


@dataclass(frozen=True, slots=True)
class Method:
    """An exported graph and its contract."""

    program: ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str]
    """Operator to the first line of model code that called it, for error messages."""

    def source_of(self, node: torch.fx.Node) -> str:
        """The line of model code behind a node, through the second trace and any decomposition."""
        traced = re.findall(r"torch\.ops\.([\w.]+)\(", node.meta.get("stack_trace") or "")
        return next(
            (self.sources[name] for name in reversed(traced) if name in self.sources), "a gradient of the block"
        )


class _Sources(TorchDispatchMode):
    """Notes which line of model code called each operator; make_fx itself does not keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in self.lines:
            frames = [frame for frame in traceback.extract_stack() if _is_model_code(frame.filename)]
            if frames:
                path = "/".join(frames[-1].filename.split("/")[-3:])
                self.lines[str(func)] = f"{path}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}"
        return func(*args, **(kwargs or {}))


def _is_model_code(filename: str) -> bool:
    return "site-packages" not in filename and "/lib/python" not in filename and filename != __file__


@dataclass(frozen=True, slots=True)
class Traceable:
    """A method before it is traced."""

    function: Callable[..., tuple[Tensor, ...]]
    examples: tuple[Tensor, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        # Inference tensors and tensors that require a gradient would leak into the graph as constants.
        object.__setattr__(self, "examples", tuple(value.detach().contiguous() for value in self.examples))

    def graph(self) -> torch.fx.Graph:
        """What the program will compute, without exporting it: enough to count memory and operations."""
        return _trace(self)[0].graph


def block_methods(kind: BlockKind, lora_scale: float) -> dict[str, Method]:
    """Exports `<kind>_forward` and `<kind>_backward`.

    Args:
        kind: Function and example tensors.
        lora_scale: alpha / rank, a constant of the graph.
    """
    return {name: _export(method, kind.name) for name, method in block_traceables(kind, lora_scale).items()}


def block_traceables(kind: BlockKind, lora_scale: float) -> dict[str, Traceable]:
    """As `block_methods`, before tracing."""
    weights, lora_names = _WeightInputs(kind.weights, kind.hidden.numel()), list(kind.lora)
    num_conditioning, num_weights = len(kind.conditioning), len(weights.specs)

    def run(hidden: Tensor, flat: Sequence[Tensor], lora: Sequence[Tensor]) -> Tensor:
        conditioning = dict(zip(kind.conditioning, flat[:num_conditioning], strict=True))
        rebuilt = weights.rebuild(flat[num_conditioning:])
        linear = FrozenLinears(rebuilt, dict(zip(lora_names, lora, strict=True)), lora_scale)
        return kind.function(hidden, conditioning, rebuilt, linear)

    def forward(*flat: Tensor) -> tuple[Tensor]:
        frozen, rest = flat[: num_conditioning + num_weights], flat[num_conditioning + num_weights :]
        return (run(rest[-1], frozen, rest[:-1]),)

    def backward(*flat: Tensor) -> tuple[Tensor, ...]:
        frozen, rest = flat[: num_conditioning + num_weights], flat[num_conditioning + num_weights :]
        *lora, hidden = (value.detach().requires_grad_(True) for value in rest[:-1])
        return torch.autograd.grad(run(hidden, frozen, lora), [hidden, *lora], rest[-1])

    state: Tensors = {"hidden": kind.hidden}
    inputs = (
        _specs("conditioning", kind.conditioning) + weights.specs + _specs("lora", kind.lora) + _specs("state", state)
    )
    examples = (*kind.conditioning.values(), *weights.examples, *kind.lora.values(), kind.hidden)
    gradients = {"grad_hidden": kind.hidden} | {f"grad.{name}": value for name, value in kind.lora.items()}
    return {
        f"{kind.name}_forward": Traceable(forward, examples, inputs, _specs("state", state)),
        f"{kind.name}_backward": Traceable(
            backward,
            (*examples, kind.hidden),
            inputs + _specs("gradient", {"grad_output": kind.hidden}),
            _specs("gradient", gradients),
        ),
    }


class _WeightInputs:
    """The program inputs of stored weights: those of linear layers in pieces of their rows, with an axis of size 1 in
    front, so that products take them without a copy."""

    def __init__(self, weights: Tensors, state_numbers: int) -> None:
        specs: list[TensorSpec] = []
        examples: list[Tensor] = []
        for name, value in weights.items():
            if not is_linear(name, value):
                specs += _specs("weight", {name: value})
                examples.append(value)
                continue
            rows, columns = value.shape
            for start, end in row_pieces(rows, columns, state_numbers):
                piece = value[start:end].unsqueeze(0)
                specs += [replace(spec, rows=(start, end)) for spec in _specs("weight", {name: piece})]
                examples.append(piece)
        self.specs, self.examples = tuple(specs), tuple(examples)

    def rebuild(self, flat: Sequence[Tensor]) -> dict[str, Any]:
        """Inputs by name, in the order of `specs`, to what block functions take."""
        whole: dict[str, Tensor] = {}
        pieces: dict[str, list[Tensor]] = {}
        for spec, value in zip(self.specs, flat, strict=True):
            if spec.rows is None:
                whole[spec.name] = value
            else:
                pieces.setdefault(spec.name, []).append(value)
        return whole | {
            name: StoredWeight(tuple(values), whole.get(name + SCALE), whole.get(name + GROUPS))
            for name, values in pieces.items()
        }


def example_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Tensors of the same shapes whose memory is never touched: exporting traces shapes."""
    return {name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()}


def loss_method(head: LossHead) -> dict[str, Method]:
    """Exports `loss`: mean squared error between prediction and target, and its gradient with respect to the hidden
    state before the tail. The tail's part is the stored residual."""
    return {"loss": _export(loss_traceable(head), "loss")}


def loss_traceable(head: LossHead) -> Traceable:
    """As `loss_method`, before tracing."""
    weights = _WeightInputs(head.weights, head.hidden.numel())
    num_conditioning = len(head.conditioning)
    num_prompt = head.hidden.shape[0] - head.tail_residual.shape[0]

    def loss(*flat: Tensor) -> tuple[Tensor, Tensor]:
        conditioning = dict(zip(head.conditioning, flat[:num_conditioning], strict=True))
        hidden, tail_residual, target = flat[-3:]
        image = hidden[num_prompt:].detach().requires_grad_(True)
        prediction = head.function(image + tail_residual, conditioning, weights.rebuild(flat[num_conditioning:-3]))
        value = (prediction - target).pow(2).mean()
        (gradient,) = torch.autograd.grad(value, [image])
        if num_prompt:  # no prompt token reaches the prediction after the last middle block
            gradient = torch.cat([torch.zeros_like(hidden[:num_prompt]), gradient])
        return value.detach(), gradient

    ends: dict[Role, Tensor] = {"state": head.hidden, "tail_residual": head.tail_residual, "target": head.target}
    names = {"state": "hidden"}
    inputs = _specs("conditioning", head.conditioning) + weights.specs
    for role, value in ends.items():
        inputs += _specs(role, {names.get(role, role): value})
    outputs = _specs("loss", {"loss": torch.zeros(())}) + _specs("gradient", {"grad_hidden": head.hidden})
    examples = (*head.conditioning.values(), *weights.examples, *ends.values())
    return Traceable(loss, examples, inputs, outputs)


class _Wrapper(torch.nn.Module):
    """torch.export takes a module."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.graph_module(*inputs)


def _export(method: Traceable, name: str) -> Method:
    """Traces through autograd, then exports."""
    graph, lines = _trace(method)
    with torch.no_grad():
        program = torch.export.export(_Wrapper(graph), method.examples, strict=False)
    exported = Method(program, method.inputs, method.outputs, lines)
    _require_closed(exported, name)
    return exported


def _trace(method: Traceable) -> tuple[torch.fx.GraphModule, dict[str, str]]:
    """The graph and its operators' lines of model code. Tracing on fake tensors: no weight is read, nothing is computed."""
    sources = _Sources()

    def recorded(*inputs: Tensor) -> tuple[Tensor, ...]:
        with sources:
            return method.function(*inputs)

    graph = make_fx(recorded, tracing_mode="fake")(*method.examples)
    _drop_detached(graph)
    return graph, sources.lines


def flops(graph: torch.fx.Graph) -> int:
    """Operations of one call: a multiply-add as two, products and convolutions alone, by torch's own counting rules."""
    total = 0
    for node in graph.nodes:
        rule = flop_registry.get(getattr(node.target, "_overloadpacket", None))
        if rule is not None:
            total += rule(*torch.fx.map_arg(node.args, lambda n: n.meta["val"]), out_val=node.meta["val"])
    return total


def _drop_detached(graph: torch.fx.GraphModule) -> None:
    """Autograd detaches what it saves; in a program each would be a copy."""
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _require_closed(method: Method, name: str) -> None:
    """Refuses graphs that captured a tensor or left a shape or dtype open.

    Raises:
        ExportError: Names the node, its operator and the line of model code it came from.
    """
    program = method.program
    signature = program.graph_signature
    captured = [*signature.parameters, *signature.buffers, *signature.lifted_tensor_constants]
    values = {key: program.state_dict.get(key, program.constants.get(key)) for key in captured}
    large = [key for key, value in values.items() if isinstance(value, Tensor) and value.numel() > 1]
    if large:
        raise ExportError(f"{name}: the graph holds tensors {large} as constants; pass them as weights.")
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else [value]:
            if isinstance(tensor, Tensor) and (
                any(not isinstance(size, int) for size in tensor.shape) or tensor.dtype == torch.float64
            ):
                raise ExportError(
                    f"{name}: {node.target} gives {tensor.dtype} {tuple(tensor.shape)}: shapes must be static and dtypes "
                    f"at most 32 bits wide. It comes from {method.source_of(node)}"
                )


def _specs(role: Role, tensors: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, role=role, dtype=DTYPE_NAMES[value.dtype], shape=tuple(value.shape))  # type: ignore[arg-type]
        for name, value in tensors.items()
    )
