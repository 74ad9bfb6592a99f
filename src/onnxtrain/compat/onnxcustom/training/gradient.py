"""The gradient of a penalty as a graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.differentiate import differentiate
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import BaseLearningPenalty
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.finish import finish
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET
from onnxtrain.graph.simplify import simplify


def penalty_gradient(
    penalty: BaseLearningPenalty, model: onnx.ModelProto, names: Sequence[str]
) -> onnx.ModelProto | None:
    """Return a graph from weights to the penalty and its gradients; ``None`` if there is none."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="penalty")
    op = OpBuilder(graph)
    known = {t.name: ir.from_proto(t) for t in model.graph.initializer}
    weights = [op.input(n, known[n].dtype, list(known[n].shape.numpy())) for n in names]
    total = penalty.build(op, weights)
    if total is None:
        return None
    gradients = differentiate(op, {total: op.const(1.0, total.dtype)}, weights)
    for value, name, like in (
        (total, "penalty", total),
        *((gradients[w], f"{w.name}_grad", w) for w in weights),
    ):
        out = op.Identity(op.zeros_like(like) if value is None else value)
        out.name, out.type, out.shape = name, like.type, like.shape
        graph.outputs.append(out)
    return finish(simplify(ir.Model(graph, ir_version=IR_VERSION)))
