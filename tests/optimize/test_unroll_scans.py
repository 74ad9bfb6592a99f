"""hoist_from_scans and unroll_scans: loops over time get short, and then copies of their body."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.recurrent import hoist_from_scans, unroll_scans
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.binding import capture_obstacle

INPUT, HIDDEN, BATCH = 3, 4, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(kind: str, steps: int | str, directions: int = 1, *, lengths: bool = False) -> bytes:
    """Return a recurrent layer and a linear layer on all its outputs."""
    g, d = GATES[kind] * HIDDEN, directions
    direction = "bidirectional" if d == 2 else "forward"
    more = f", int32[{BATCH}] n" if lengths else ""
    reset = ", linear_before_reset=1" if kind == "GRU" else ""
    layer = f'{kind} <hidden_size={HIDDEN}, direction="{direction}"{reset}>'
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{steps},{BATCH},{INPUT}] x{more})
          => (float[m,{HIDDEN}] y) {{
          a, last = {layer} (x, w, r, b{", n" if lengths else ""})
          t = Transpose <perm=[0,2,1,3]> (a)
          flat = Reshape (t, shape)
          y = MatMul (flat, out)
        }}"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((d, g, INPUT)) * 0.5,
        "r": rng.standard_normal((d, g, HIDDEN)) * 0.5,
        "b": rng.standard_normal((d, 2 * g)) * 0.1,
        "out": rng.standard_normal((d * HIDDEN, HIDDEN)),
    }
    arrays = {n: a.astype(np.float32) for n, a in weights.items()}
    arrays["shape"] = np.array([-1, d * HIDDEN])
    model.graph.initializer.extend(ir.to_proto(ir.tensor(a, name=n)) for n, a in arrays.items())
    return model.SerializeToString()


def losses(model: bytes, target: str, steps: int, feeds: dict[str, np.ndarray]) -> list[float]:
    artifacts = onnxtrain.build(model, loss="mse", optimizer="adamw", target=target, check=False)
    trainer = onnxtrain.Trainer(artifacts, device="cpu")
    trainer.lr = 0.05
    targets = np.ones((steps * BATCH, HIDDEN), np.float32)
    return [trainer.step(**feeds, target=targets).loss for _ in range(4)]


@pytest.mark.parametrize(
    ("kind", "steps", "directions", "lengths"),
    [
        ("LSTM", 5, 1, False),
        ("LSTM", 40, 2, False),
        ("LSTM", 5, 2, True),
        ("GRU", 5, 2, False),
        ("RNN", 40, 1, True),
    ],
)
def test_unrolled_layers_learn_the_same(
    kind: str, steps: int, directions: int, lengths: bool
) -> None:
    rng = np.random.default_rng(1)
    feeds: dict[str, np.ndarray] = {
        "x": rng.standard_normal((steps, BATCH, INPUT)).astype(np.float32)
    }
    if lengths:
        feeds["n"] = np.array([steps, 2], np.int32)
    model = recurrent(kind, steps, directions, lengths=lengths)
    expected = losses(model, "cpu", steps, feeds)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses(model, "cuda", steps, feeds), expected, rtol=1e-5)


def test_steps_of_known_sizes_can_be_captured() -> None:
    artifacts = onnxtrain.build(
        recurrent("LSTM", 40), loss="mse", optimizer="adamw", target="cuda", check=False
    )
    spec = next(m for m in artifacts.manifest.models if m.role == "step")
    assert capture_obstacle(artifacts.models["step"], spec) is None


def test_the_backward_loop_reads_steps_without_a_concat() -> None:
    model = recurrent("RNN", 5)
    gradients = onnxtrain.vjp(model, wrt=["x"], target="cuda")
    kinds = [n.op_type for n in gradients.graph.node]
    assert kinds.count("Tanh") == 5
    # The outputs of the layer and the gradient of its input; no saved value is stacked.
    assert kinds.count("Concat") <= 2


def test_derivatives_of_activations_leave_the_loop() -> None:
    gradients = onnxtrain.vjp(recurrent("LSTM", "T"), wrt=["x"], target="cuda")
    backward = [n for n in gradients.graph.node if n.op_type == "Scan"][1]
    (body,) = [a.g for a in backward.attribute if a.name == "body"]
    kinds = [n.op_type for n in body.node]
    # The gradient of the state times a factor, that of the cell times f, and all gates at once.
    assert (kinds.count("Sub"), kinds.count("Mul"), kinds.count("Concat")) == (0, 3, 1)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((6, BATCH, INPUT)).astype(np.float32)}
    expected = losses(recurrent("LSTM", "T", 2), "cpu", 6, feeds)
    np.testing.assert_allclose(
        losses(recurrent("LSTM", "T", 2), "cuda", 6, feeds), expected, rtol=1e-5
    )


def test_bias_gradients_are_sums_after_the_loop() -> None:
    gradients = onnxtrain.vjp(recurrent("GRU", "T"), wrt=["b"], target="cpu")
    backward = [n for n in gradients.graph.node if n.op_type == "Scan"][1]
    (body,) = [a.g for a in backward.attribute if a.name == "body"]
    assert "ReduceSum" not in {n.op_type for n in body.node}


@pytest.mark.parametrize("shape", ["", "[1]", "[1,1]"])
def test_constants_of_the_body_leave_it_with_the_operator(shape: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] s, float[3,2] x) => (float[2] last) {{
          last = Scan <num_scan_inputs=1,
              body = b (float[2] s0, float[2] x0) => (float[2] s1) <float{shape} c = {{2.0}}> {{
                scaled = Mul(x0, c)
                t = ReduceSum<keepdims=0>(scaled)
                s1 = Add(s0, t)
              }}> (s, x)
        }}"""
    model = onnx.shape_inference.infer_shapes(parser.parse_model(text))
    graph = ir.from_proto(model)
    hoisted = hoist_from_scans(graph, OpBuilder(graph.graph, "t/", target="cuda"))
    assert hoisted == (shape != "[1,1]")
    feeds = {"s": np.ones(2, np.float32), "x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    before, after = (
        runtime.run(runtime.create(m.SerializeToString()), ["last"], feeds)[0]
        for m in (model, ir.to_proto(graph))
    )
    np.testing.assert_array_equal(after, before)


def test_slices_of_opposite_directions_stay_in_the_loop() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[2] s, float[3,2] x) => (float[2] last) {
          last = Scan <num_scan_inputs=2, scan_input_directions=[0,1],
              body = b (float[2] s0, float[2] x0, float[2] x1) => (float[2] s1) {
                square = Mul(x0, x0)
                product = Mul(x0, x1)
                t = Add(s0, square)
                s1 = Add(t, product)
              }> (s, x, x)
        }"""
    model = parser.parse_model(text)
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert hoist_from_scans(graph, OpBuilder(graph.graph, "t/", target="cuda")) == 1
    feeds = {"s": np.ones(2, np.float32), "x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    before, after = (
        runtime.run(runtime.create(m.SerializeToString()), ["last"], feeds)[0]
        for m in (model, ir.to_proto(graph))
    )
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("steps", ["T", 300])
def test_loops_of_unknown_or_many_steps_stay(steps: int | str) -> None:
    gradients = onnxtrain.vjp(recurrent("GRU", steps), wrt=["x"], target="cuda")
    assert [n.op_type for n in gradients.graph.node].count("Scan") == 2


def test_a_loop_above_the_limit_of_nodes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "UNROLLED_LOOP_NODES", 20)
    gradients = onnxtrain.vjp(recurrent("GRU", 5), wrt=["x"], target="cuda")
    assert [n.op_type for n in gradients.graph.node].count("Scan") == 2


def test_slices_and_results_of_other_axes_and_directions() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[2] s, float[2,3] x) => (float[2] last, float[2,3] ys) {
          last, ys = Scan <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
              scan_input_directions=[1], scan_output_directions=[1],
              body = b (float[2] s0, float[2] x0) => (float[2] s1, float[2] y0) {
                s1 = Add(s0, x0)
                y0 = Mul(s1, x0)
              }> (s, x)
        }"""
    model = parser.parse_model(text)
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert unroll_scans(graph, OpBuilder(graph.graph, "t/", target="cuda")) == 1
    unrolled = ir.to_proto(simplify(graph))
    assert "Scan" not in {n.op_type for n in unrolled.graph.node}
    feeds = {"s": np.ones(2, np.float32), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    results = [
        runtime.run(runtime.create(m.SerializeToString()), ["last", "ys"], feeds)
        for m in (model, unrolled)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
