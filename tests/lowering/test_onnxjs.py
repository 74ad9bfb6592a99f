"""Run the zoo in onnxjs 0.1.8 in Node at batch 1; `make test` installs onnxjs."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper as oh
from onnx import numpy_helper as onh

from onnxtrain.lowering.lower import lower
from onnxtrain.lowering.profile import find, unsupported_nodes
from tests.zoo.models import ZOO

from . import onnxjs_zoo
from .cases import f, w
from .single import Case, feeds_of, model_of, run

pytestmark = pytest.mark.skipif(
    bool(onnxjs_zoo.why_unavailable()), reason=onnxjs_zoo.why_unavailable()
)

NOT_LOWERED = {"spatial_transformer", "dlrm"}  # they cannot be lowered to opset 7
# onnxjs has all operators of these models (Gemm, Relu, ...); two are exports of opset 9.
RUNS_UNCHANGED = {"lenet_opset9", "lora", "mlp", "mlp_opset9", "ncf", "siren"}


SAMPLE = sorted(NOT_LOWERED | RUNS_UNCHANGED | set(sorted(ZOO)[::4]))


def test_a_sample_of_the_zoo(tmp_path):
    check(SAMPLE, tmp_path)


@pytest.mark.full
def test_the_whole_zoo(tmp_path):
    check(list(ZOO), tmp_path)


def check(names, folder):
    """Check that every lowered model is right, and that onnxjs refuses almost all originals."""
    outcomes = onnxjs_zoo.in_onnxjs(names, folder)
    lowered = {name: outcome for name, (_, outcome) in outcomes.items()}
    right = {n for n, outcome in lowered.items() if outcome.status == "right"}
    others = {n: o for n, o in lowered.items() if n not in right}
    assert set(others) == NOT_LOWERED, others
    assert {o.status for o in others.values()} == {"not lowered"}
    assert len(right) >= max(15, 0.85 * (len(names) - len(NOT_LOWERED)))
    originals = {name: outcome for name, (outcome, _) in outcomes.items()}
    accepted = {n: o.status for n, o in originals.items() if o.status != "refused"}
    assert accepted == dict.fromkeys(RUNS_UNCHANGED, "right")


def test_conv_of_a_batch_is_lowered_to_one_conv_per_image(tmp_path):
    """onnxjs computes wrong outputs for batches above 1; the profile limits the batch."""
    case = Case("Conv", (f(3, 2, 5, 5), w(4, 2, 3, 3), w(4)))
    model, feeds = model_of(case), feeds_of(case)
    lowered = lower(model, onnxjs_zoo.PROFILE)
    assert sum(n.op_type == "Conv" for n in lowered.graph.node) == 3
    plain = lower(model, opset=7)
    inputs = [onnxjs_zoo._tensor(x) for x in feeds.values()]
    jobs = [
        onnxjs_zoo._job(tmp_path / f"{i}.onnx", m, inputs) for i, m in enumerate((plain, lowered))
    ]
    wrong, right = onnxjs_zoo._run(jobs, tmp_path / "jobs.json")
    expected = run(model, feeds)
    assert onnxjs_zoo._outcome(wrong, expected).status == "wrong"
    assert onnxjs_zoo._outcome(right, expected).status == "right"
    np.testing.assert_array_equal(np.shape(expected[0]), right["outputs"][0]["dims"])


def normalized_by_base_operators() -> onnx.ModelProto:
    """Return a net as torch 1.0 exported it: opset 9, shapes in Constant nodes."""
    rng = np.random.default_rng(3)

    def constant(name: str, values: np.ndarray | list[int]) -> onnx.NodeProto:
        return oh.make_node("Constant", [], [name], value=onh.from_array(np.asarray(values)))

    weights = {
        "w1": rng.normal(size=(4, 3, 3, 3)),
        "scale": rng.normal(size=4),
        "w2": rng.normal(size=(2, 4, 3, 3)),
    }
    nodes = [
        oh.make_node("Pad", ["x"], ["p"], mode="reflect", pads=[0, 0, 1, 1, 0, 0, 1, 1]),
        oh.make_node("Conv", ["p", "w1"], ["h"], kernel_shape=[3, 3]),
        constant("rows", [1, 4, 1, -1]),
        oh.make_node("Reshape", ["h", "rows"], ["r"]),
        oh.make_node("ReduceMean", ["r"], ["mean"], axes=[3], keepdims=1),
        oh.make_node("Sub", ["h", "mean"], ["centered"]),
        constant("column", [-1, 4, 1, 1]),
        oh.make_node("Reshape", ["scale", "column"], ["factor"]),
        oh.make_node("Mul", ["centered", "factor"], ["n"]),
        oh.make_node("Conv", ["n", "w2"], ["y"], kernel_shape=[3, 3]),
    ]
    arrays = {n: a.astype(np.float32) for n, a in weights.items()}
    inputs = {"x": (1, 3, 6, 6), **{n: a.shape for n, a in arrays.items()}}
    graph = oh.make_graph(
        nodes,
        "net",
        [oh.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in inputs.items()],
        [oh.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 4, 4])],
        [onh.from_array(a, n) for n, a in arrays.items()],
    )
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 9)], ir_version=3)


def test_check_accepts_what_onnxjs_runs_at_opset_9(tmp_path):
    model = normalized_by_base_operators()
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 3, 6, 6)).astype(np.float32)}
    job = onnxjs_zoo._job(tmp_path / "net.onnx", model, [onnxjs_zoo._tensor(feeds["x"])])
    (answer,) = onnxjs_zoo._run([job], tmp_path / "jobs.json")
    assert onnxjs_zoo._outcome(answer, run(model, feeds)).status == "right"
    assert unsupported_nodes(ir.from_proto(model), find(onnxjs_zoo.PROFILE)) == []
