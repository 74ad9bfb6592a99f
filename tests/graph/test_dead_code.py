"""Dead code: what no output depends on is removed, whatever release of onnx-ir is installed."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.graph.simplify import remove_dead

NET = """
<ir_version: 8, opset_import: ["" : {opset}]>
net (float[n, 3] x, float[n, 3] cotangent) => (float[n, 3] y, float[n, 3] z)
<float[3] s = {{1, 2, 3}}, float[3] b = {{0, 0, 0}},
 float[3] m = {{0, 0, 0}}, float[3] v = {{1, 1, 1}}>
{{
  {norm}
  z = Add(cotangent, s)
}}
"""


def net(norm: str, opset: int = 21) -> ir.Model:
    return ir.from_onnx_text(NET.format(norm=norm, opset=opset))


TRAINING = "y, mean, var = BatchNormalization <training_mode = 1> (x, s, b, m, v)"


def test_nodes_behind_outputs_that_were_deleted_are_dead() -> None:
    model = net(TRAINING)
    del model.graph.outputs[1:]
    del model.graph.inputs[1:]
    remove_dead(model)
    assert [n.op_type for n in model.graph] == ["BatchNormalization"]
    assert set(model.graph.initializers) == {"s", "b", "m", "v"}


@pytest.mark.parametrize(
    ("norm", "opset", "outputs"),
    [
        (TRAINING, 21, 3),
        (TRAINING.replace("y, mean, var", "y"), 21, 1),
        ("y, m1, v1, m2, v2 = BatchNormalization (x, s, b, m, v)", 13, 5),
        ("y = BatchNormalization (x, s, b, m, v)", 21, 1),
    ],
)
def test_batch_normalization_keeps_its_mode(norm: str, opset: int, outputs: int) -> None:
    model = net(norm, opset)
    remove_dead(model)
    node = next(n for n in model.graph if n.op_type == "BatchNormalization")
    assert len(node.outputs) == outputs
    assert ("training_mode" in node.attributes) == ("training_mode" in norm)


def test_unused_optional_outputs_are_removed() -> None:
    model = net("y, mask = Dropout(x)")
    remove_dead(model)
    dropout = next(n for n in model.graph if n.op_type == "Dropout")
    assert [y.name for y in dropout.outputs] == ["y"]
