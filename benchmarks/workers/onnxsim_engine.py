"""onnxsim's ``compile_training_loop`` on the same stock onnxruntime as this project.

It has Adam but no AdamW, and plain SGD only as an optimizer given by the caller. It leaves the
session's threads and denormals to onnxruntime's defaults; here they are set for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxsim
from onnx import TensorProto, helper  # noqa: TID251  its environment has no onnx_ir
from onnxsim.compile_training import CustomOptimizer

from benchmarks.workers.serve import Engine, first_use, serve

OPSET = 17  # of its step graphs


def tuned_options(threads: int) -> None:
    """Set the number of threads and flush denormals in every later session."""
    plain = onnxruntime.SessionOptions

    def options() -> Any:
        made = plain()
        made.intra_op_num_threads = threads
        made.add_session_config_entry("session.set_denormal_as_zero", "1")
        return made

    onnxruntime.SessionOptions = options


def sgd() -> CustomOptimizer:
    """Return plain SGD in its form of an optimizer."""
    names = ("param", "grad", "lr")
    shapes = ([2, 2], [2, 2], [])
    nodes = [
        helper.make_node("Mul", ["grad", "lr"], ["move"]),
        helper.make_node("Sub", ["param", "move"], ["new"]),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in zip(names, shapes, strict=True)
    ]
    outputs = [helper.make_tensor_value_info("new", TensorProto.FLOAT, [2, 2])]
    graph = helper.make_graph(nodes, "sgd", inputs, outputs)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", OPSET)])
    return CustomOptimizer(model=model, num_state=0)


def with_loss(model: onnx.ModelProto, rows: int, classes: int) -> None:
    """Append the mean cross entropy in operators that it differentiates."""
    scores = model.graph.output[0].name
    labels = helper.make_tensor_value_info("labels", TensorProto.FLOAT, [rows, classes])
    model.graph.input.append(labels)
    model.graph.initializer.append(
        helper.make_tensor("loss_scale", TensorProto.FLOAT, [], [-1.0 / rows])
    )
    model.graph.initializer.append(helper.make_tensor("loss_axes", TensorProto.INT64, [2], [0, 1]))
    for kind, inputs, out, attributes in (
        ("Softmax", [scores], "loss_p", {"axis": -1}),
        ("Log", ["loss_p"], "loss_log", {}),
        ("Mul", ["loss_log", "labels"], "loss_each", {}),
        ("ReduceSum", ["loss_each", "loss_axes"], "loss_sum", {"keepdims": 0}),
        ("Mul", ["loss_sum", "loss_scale"], "loss", {}),
    ):
        model.graph.node.append(helper.make_node(kind, inputs, [out], **attributes))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))


def flat_gathers(model: onnx.ModelProto) -> None:
    """Spell every Gather of rows by a matrix of indices with a vector of them, which it knows."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    shapes.update({t.name: list(t.dims) for t in model.graph.initializer})
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for i, node in enumerate(nodes):
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if node.op_type != "Gather" or axis != 0 or len(shapes.get(node.input[1], [])) < 2:
            model.graph.node.append(node)
            continue
        flat, rows = f"flat_{i}", f"rows_{i}"
        for name, sizes in ((f"one_{i}", [-1]), (f"back_{i}", shapes[node.output[0]])):
            model.graph.initializer.append(
                helper.make_tensor(name, TensorProto.INT64, [len(sizes)], sizes)
            )
        model.graph.node.extend(
            [
                helper.make_node("Reshape", [node.input[1], f"one_{i}"], [flat]),
                helper.make_node("Gather", [node.input[0], flat], [rows], axis=0),
                helper.make_node("Reshape", [rows, f"back_{i}"], [node.output[0]]),
            ]
        )


class Onnxsim(Engine):
    """A simplified model, its loss, and the loop compiled at the first step."""

    def load(self, folder: Path, made: Path, optimizer: str, threads: int, **facts: Any) -> None:
        """Make the loop."""
        tuned_options(threads)
        model = onnx.load(str(folder / "opset17.onnx"))
        # Layers start as copies of one another; as one initializer they would train as one.
        model, _ = onnxsim.simplify(
            model,
            initializers_as_constants=False,
            skipped_optimizers=["eliminate_duplicate_initializer"],
        )
        with np.load(folder / "batch.npz") as data:
            x, labels = data["x"], data["labels"]
        rows, classes = len(labels), facts["classes"]
        flat_gathers(model)
        with_loss(model, rows, classes)
        kind = sgd() if optimizer == "sgd" else "adam"
        trained = (folder / "parameters.txt").read_text().split()
        known = {t.name for t in model.graph.initializer}
        lost = [n for n in trained if n not in known]
        if lost:
            raise ValueError(f"onnxsim.simplify removed parameters: {', '.join(lost)}")
        self.loop = onnxsim.compile_training_loop(model, "loss", trained, kind)
        hot = np.zeros((rows, classes), np.float32)
        hot[np.arange(rows), labels] = 1.0
        self.feeds = {"x": x, "labels": hot}

    def step(self, lr: float) -> float:
        """Train one step."""
        return self.loop(self.feeds, lr=lr)

    def versions(self) -> dict[str, str]:
        """Return the versions that matter."""
        return {"onnxsim": onnxsim.__version__, "onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    first_use(onnxruntime)
    serve(Onnxsim())
