"""BatchNormalization with the statistics of all workers, as ``torch.nn.SyncBatchNorm`` has them.

The graph is cut at its BatchNormalization nodes:

    before:  x -> Conv -> BatchNormalization -> Relu -> Conv -> BatchNormalization -> y
    after:   x -> [Conv] -> batch_norm -> [Relu, Conv] -> batch_norm -> y

Each stage in brackets has sessions of its own. Torch computes the normalizations between them, with
all-reduces of sums per channel, and connects the backward passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
import torch.distributed
from torch import nn

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.nodes import captured, is_op
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.modes.train_eval import momentum_of
from onnxtrain.torch.module import CompiledCall, CompiledFunction, run_forward

_DEFAULT_EPSILON = 1e-5  # in the ONNX schema
CompileStage = Callable[[ir.Model, list[str], list[str], list[str]], CompiledCall]
"""Compiles a stage, given its inputs, its outputs and the inputs that get a gradient."""


def has_peers() -> bool:
    """Return whether this process is one of several workers."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all workers; its gradient is that of all their losses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dy: torch.Tensor
    ) -> torch.Tensor:
        return _Sum.forward(ctx, dy)


def _sum(x: torch.Tensor) -> torch.Tensor:
    total = _Sum.apply(x)
    assert isinstance(total, torch.Tensor)
    return total


class Normalization(NamedTuple):
    """A BatchNormalization node in training mode, by the names of its values."""

    inputs: tuple[str, ...]
    """``x``, scale, bias, running mean and running variance."""
    output: str
    epsilon: float
    momentum: float

    def run(self, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> Any:
        """Return the normalized batch; update the running statistics."""
        x, scale, bias = (values[n] for n in self.inputs[:3])
        axes, column = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        rows = _sum(torch.tensor(x.numel() / x.shape[1], device=x.device))
        mean = _sum(x.float().sum(axes)) / rows
        centered = x.float() - mean.view(column)
        variance = _sum(centered.square().sum(axes)) / rows
        factor = scale.float() * (variance + self.epsilon).rsqrt()
        y = centered * factor.view(column) + bias.float().view(column)
        new = (mean, variance * rows / (rows - 1).clamp(min=1))  # unbiased, as torch has it
        with torch.no_grad():
            for name, value in zip(self.inputs[3:], new, strict=True):
                if name in buffers:
                    old = buffers[name]
                    old.copy_(self.momentum * old + (1 - self.momentum) * value)
        return y.to(x.dtype)


@dataclasses.dataclass
class Stage:
    """Nodes that depend on equally many normalizations, and the normalizations behind them."""

    compiled: CompiledCall | None
    normalizations: list[Normalization]


@dataclasses.dataclass
class SynchronizedCall:
    """A graph in stages."""

    stages: list[Stage]
    outputs: list[str]
    constants: dict[str, torch.Tensor]
    """Frozen scales and biases of normalizations."""

    def run(self, module: nn.Module, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for inputs and parameters by name."""
        values, buffers = {**self.constants, **given}, dict(module.named_buffers())
        for stage in self.stages:
            call = stage.compiled
            if call is not None:
                names = [*call.inputs, *call.initializers]
                feeds = {n: values[n] for n in names}
                if call.backward is None:
                    results = run_forward(call, module, feeds)
                    values |= {n: results[n] for n in call.outputs}
                else:
                    results = CompiledFunction.apply(call, module, *feeds.values())
                    assert isinstance(results, tuple)
                    values |= dict(zip(call.outputs, results, strict=True))
            for norm in stage.normalizations:
                values[norm.output] = norm.run(values, buffers)
        return [values[n] for n in self.outputs]


def synchronize(
    work: ir.Model, wrt: Iterable[str], compile_stage: CompileStage
) -> SynchronizedCall | None:
    """Return a graph in training mode in stages; ``None`` if nothing in it is to synchronize.

    Args:
        work: the graph, whose parameters and running statistics are inputs.
        wrt: inputs that get a gradient.
        compile_stage: creates the sessions of a stage.

    Raises:
        OnnxTrainError: if a node of a subgraph is to synchronize.
    """
    graph = work.graph
    for node in graph.all_nodes():
        if _is_synchronized(node) and node.graph is not graph:
            raise OnnxTrainError(
                f"BatchNormalization {node.name!r} is in the body of another node: its statistics "
                "cannot be synchronized\nhint: as_module(..., sync_batch_norm=False)"
            )
    depths, stage_of = _depths(graph), dict[ir.Node, int]()
    for node in graph:
        stage_of[node] = max((depths.get(x, 0) for x in _inputs(node)), default=0)
    last = max((depths.get(y, 0) for y in graph.outputs), default=0)
    if not last:
        return None
    needs = {x for x in graph.inputs if x.name in set(wrt)}
    for node in graph:
        if not needs.isdisjoint(_inputs(node)):
            needs.update(node.outputs)
    stages, constants = [], dict[str, torch.Tensor]()
    for i in range(last + 1):
        norms = [n for n in graph if _is_synchronized(n) and stage_of[n] == i]
        inside = [n for n in graph if not _is_synchronized(n) and stage_of[n] == i]
        stages.append(
            Stage(
                _compile_inside(work, inside, needs, compile_stage),
                [_normalization(n) for n in norms],
            )
        )
        for x in (x for n in norms for x in n.inputs[1:3]):
            if x is not None and x.const_value is not None:
                constants[x.name or ""] = torch.from_numpy(x.const_value.numpy().copy())
    return SynchronizedCall(stages, [y.name or "" for y in graph.outputs], constants)


def _is_synchronized(node: ir.Node) -> bool:
    mode = node.attributes.get("training_mode")
    return is_op(node, "BatchNormalization") and mode is not None and bool(mode.as_int())


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [x for x in (*node.inputs, *captured(node)) if x is not None]


def _depths(graph: ir.Graph) -> dict[ir.Value, int]:
    """Return how many normalizations lie before each value."""
    depths: dict[ir.Value, int] = {}
    for node in graph:
        depth = max((depths.get(x, 0) for x in _inputs(node)), default=0)
        depths |= dict.fromkeys(node.outputs, depth + _is_synchronized(node))
    return depths


def _normalization(node: ir.Node) -> Normalization:
    epsilon = node.attributes.get("epsilon")
    return Normalization(
        tuple(x.name or "" for x in node.inputs if x is not None),
        node.outputs[0].name or "",
        _DEFAULT_EPSILON if epsilon is None else epsilon.as_float(),
        momentum_of(node),
    )


def _compile_inside(
    work: ir.Model,
    inside: Collection[ir.Node],
    needs: Collection[ir.Value],
    compile_stage: CompileStage,
) -> CompiledCall | None:
    """Compile some nodes of a graph; ``None`` if nothing reads their results."""
    own = {y for node in inside for y in node.outputs}
    members = set(inside)
    elsewhere = {*work.graph.outputs}
    elsewhere.update(x for node in work.graph if node not in members for x in _inputs(node))
    outputs = [y for node in inside for y in node.outputs if y in elsewhere]
    if not outputs:
        return None
    read = dict.fromkeys(x for node in inside for x in _inputs(node) if x not in own)
    inputs = [x for x in read if x.is_graph_input() or x.producer() is not None]
    names = [x.name or "" for x in inputs]
    part = work.clone()
    by_name = {y.name: y for node in part.graph for y in node.outputs}
    for x in inputs:
        made = by_name.get(x.name)
        if made is not None:
            given = ir.Value(name=x.name, shape=x.shape, type=x.type)
            made.name = f"{x.name}/cut"
            made.replace_all_uses_with(given)
            part.graph.inputs.append(given)
    part.graph.outputs[:] = [by_name[y.name] for y in outputs]
    remove_dead(part)
    part.graph.inputs[:] = [x for x in part.graph.inputs if x.name in names]
    wrt = [x.name or "" for x in inputs if x in needs]
    return compile_stage(part, names, [y.name or "" for y in outputs], wrt)
