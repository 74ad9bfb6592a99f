"""Parts of the rules for nodes with bodies: reverse sweeps inside, and more outputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.accumulate import accumulate
from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import RANDOM

Maybe = ir.Value | None


def sweep(
    op: OpBuilder, outputs: Sequence[ir.Value], dys: Sequence[Maybe], wrt: Sequence[ir.Value]
) -> list[Maybe]:
    """Run the reverse sweep of a body; return the gradient of each ``wrt``."""
    cotangents: dict[ir.Value, ir.Value] = {}
    for y, dy in zip(outputs, dys, strict=False):
        if dy is not None and S.is_float(y):
            cotangents[y] = accumulate(op, cotangents[y], dy) if y in cotangents else dy
    grads = differentiate(op, cotangents, wrt)
    return [grads[x] for x in wrt]


def own(op: OpBuilder, grads: Sequence[Maybe], wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Return gradients as values that a body may return: made inside it, each of its own."""
    own = []
    for g, x in zip(grads, wrt, strict=True):
        out = op.Identity(op.zeros_like(x) if g is None else g)
        out.type, out.shape = x.type, x.shape
        own.append(out)
    return own


def append_identities(op: OpBuilder, body: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Make a body give more of its values."""
    inner = OpBuilder(body, op.prefix, target=op.target, parent=op)
    for value in values:
        body.outputs.append(inner.Identity(value))


def name_outputs(op: OpBuilder, node: ir.Node) -> None:
    """Name the outputs that have no name yet."""
    for i, out in enumerate(node.outputs):
        if not out.name:
            out.name = op.names.fresh(f"{node.outputs[0].name}.{i}")


def refuse_randomness(node: ir.Node) -> None:
    """Raise if a body draws random numbers."""
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        for inner in attribute.as_graph().all_nodes():
            if inner.op_type in RANDOM:
                raise UndifferentiableError(
                    f"node {inner.name!r} ({inner.op_type}) draws random numbers inside "
                    f"{node.op_type} {node.name!r}; the backward pass could not draw the same\n"
                    "hint: draw them outside and pass them in"
                )


def shaped(d: ir.Value, x: ir.Value) -> ir.Value:
    """Return a gradient with the shape of what it is the gradient of."""
    d.shape = x.shape
    return d
