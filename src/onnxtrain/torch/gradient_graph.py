"""Export the gradient graph and the optimizer step of a torch module as single ONNX files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.autodiff.gradients import GradientModel, load_normalized
from onnxtrain.errors import LoweringError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer.opset import OPSET
from onnxtrain.lowering.lower import lower
from onnxtrain.lowering.profile import NEWEST, OLDEST
from onnxtrain.optim import Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.torch.export import from_torch, last_report


class _WithLoss(nn.Module):
    """A module and its loss function in one forward pass, for a single export."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(
        self, input: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and loss."""
        output = self.model(input)
        return output, self.loss_fn(output, labels)


def export_gradient_graph(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = OPSET,
) -> None:
    """Write a model that computes the output, the loss and the gradient of every parameter.

    Its inputs are ``input``, ``labels`` and the parameters by name, in module order. Its outputs
    are ``output``, ``loss`` and ``<parameter>_grad``, in the same order. The batch is symbolic.

    Args:
        model: any module with one input and one output.
        loss_fn: a function of (output, labels) that returns a scalar.
        example_input: an example input for the export.
        example_labels: example labels for the export.
        gradient_graph_path: the file to write.
        opset_version: opset of the file. The graph is built in opset 21; :func:`onnxtrain.lower`
            rewrites it for another one and compares both on random values.

    Raises:
        ExportError: if no exporter produces a model that matches the module.
        LoweringError: if nodes cannot be expressed in the opset; names all of them.
    """
    _check_opset(opset_version)
    exported = from_torch(
        _WithLoss(model, loss_fn), (example_input, example_labels), train=model.training
    )
    prefix = "model."
    initializer_of = {
        name.removeprefix(prefix): initializer
        for name, initializer in last_report(exported).names.items()
        if name.startswith(prefix)
    }
    work = load_normalized(exported)
    graph = work.graph
    parameters = [graph.initializers[initializer_of[n]] for n, _ in model.named_parameters()]
    gradient = GradientModel(work)
    gradient.lift(parameters)
    op = gradient.op
    output, loss = graph.outputs[0], graph.outputs[1]
    grads = gradient.differentiate({loss: op.const(1.0, loss.dtype)}, parameters)
    for x, (name, _) in zip(parameters, model.named_parameters(), strict=True):
        x.name = name
    _rename(op, output, "output")
    _rename(op, loss, "loss")
    del graph.outputs[2:]
    for (name, parameter), x in zip(model.named_parameters(), parameters, strict=True):
        if not parameter.requires_grad:
            continue
        g = grads[x]
        out = op.Identity(op.zeros_like(x) if g is None else g)
        out.name, out.type, out.shape = f"{name}_grad", x.type, x.shape
        graph.outputs.append(out)
    save(_lower_to_opset(gradient.finish(), opset_version), gradient_graph_path)


def _check_opset(opset: int) -> None:
    """Raise for an unknown opset before the export, which takes seconds."""
    if not OLDEST <= opset <= NEWEST:
        raise LoweringError(f"unknown opset: {opset} (expected {OLDEST} to {NEWEST})")


def _lower_to_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    return proto if opset == OPSET else lower(proto, opset=opset)


def _rename(op: OpBuilder, value: ir.Value, name: str) -> None:
    if value.name != name and name in op.names.taken:
        for node in op.graph:
            for y in node.outputs:
                if y.name == name:
                    y.name = op.names.fresh(f"{name}.inner")
    value.name = name


def export_optimizer_graph(
    named_params: Iterable[tuple[str, Any]],
    optimizer: str | Optimizer = "adam",
    path: str | os.PathLike[str] | None = None,
    opset_version: int = OPSET,
) -> onnx.ModelProto:
    """Return a model of one optimizer step; write it if a path is given.

    The model has no state of its own. For each parameter ``p``, its inputs are ``p``,
    ``p.gradient``, ``p.learning_rate`` (float32[1]), ``p.step`` (int64[1]) and the optimizer state,
    such as ``p.exp_avg``. Its outputs are ``p.out``, ``p.step.out`` and the new state, such as
    ``p.exp_avg.out``.

    Args:
        named_params: names and tensors, as from ``module.named_parameters()``; reads shapes only.
        optimizer: a name or an :class:`onnxtrain.optim.Optimizer`.
        path: the file to write.
        opset_version: as in :func:`export_gradient_graph`.

    Raises:
        LoweringError: if nodes cannot be expressed in the opset.
    """
    _check_opset(opset_version)
    chosen = resolve_optimizer(optimizer)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="optimizer")
    model = ir.Model(graph, ir_version=10)
    op = OpBuilder(graph, "update/")
    for name, value in named_params:
        shape = tuple(value.shape)
        p = op.input(name, ir.DataType.FLOAT, shape)
        g = op.input(f"{name}.gradient", ir.DataType.FLOAT, shape)
        lr = op.input(f"{name}.learning_rate", ir.DataType.FLOAT, [1])
        step = op.input(f"{name}.step", ir.DataType.INT64, [1])
        state = {
            f"{name}.{s.name}": op.input(f"{name}.{s.name}", s.dtype, s.dims)
            for s in chosen.slots(name, shape, ir.DataType.FLOAT)
        }
        new, new_state = chosen.apply(op, {name: p}, {name: g}, state, lr, step)
        results = {**new, f"{name}.step": op.Add(step, 1), **new_state}
        for label, result in results.items():
            out = op.Identity(result)
            out.name = f"{label}.out"
            graph.outputs.append(out)
    proto = _lower_to_opset(finalize(simplify(model)), opset_version)
    if path is not None:
        save(proto, path)
    return proto
