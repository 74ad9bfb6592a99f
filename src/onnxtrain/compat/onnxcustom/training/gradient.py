"""The gradient of a penalty as a graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import GradientModel
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import BaseLearningPenalty
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, OPSET


def penalty_gradient(
    penalty: BaseLearningPenalty, model: onnx.ModelProto, names: Sequence[str]
) -> onnx.ModelProto | None:
    """Return a graph from weights to the penalty and its gradients; ``None`` if there is none."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="penalty")
    op = OpBuilder(graph)
    known = {t.name: ir.from_proto(t) for t in model.graph.initializer}
    tensors = [(n, known[n]) for n in names if n in known]  # training refuses unknown names
    weights = [op.input(n, tensor.dtype, list(tensor.shape.numpy())) for n, tensor in tensors]
    total = penalty.build(op, weights)
    if total is None:
        return None
    made = GradientModel(Prepared.of(ir.Model(graph, ir_version=IR_VERSION)))
    gradients = made.differentiate({total: made.op.const(1.0, total.dtype)}, weights)
    made.output("penalty", total, total)
    for w in weights:
        made.output(f"{w.name}_grad", gradients[w], w)
    return made.finish()
