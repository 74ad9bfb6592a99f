"""Run the zoo in onnxjs 0.1.8 in Node at batch 1; `make test` installs onnxjs."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

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

    def weight(name: str, *shape: int) -> str:
        numbers = ", ".join(f"{v:.4f}" for v in rng.normal(size=shape).ravel())
        return f"float[{','.join(map(str, shape))}] {name} = {{{numbers}}}"

    weights = [weight("w1", 4, 3, 3, 3), weight("scale", 4), weight("w2", 2, 4, 3, 3)]
    return onnx.parser.parse_model(
        f"""
        <ir_version: 3, opset_import: ["" : 9]>
        net (float[1,3,6,6] x, {", ".join(w.split(" =")[0] for w in weights)})
            => (float[1,2,4,4] y) <{", ".join(weights)}> {{
            p = Pad <mode = "reflect", pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x)
            h = Conv <kernel_shape = [3, 3]> (p, w1)
            rows = Constant <value = int64[4] {{1, 4, 1, -1}}> ()
            r = Reshape (h, rows)
            mean = ReduceMean <axes = [3], keepdims = 1> (r)
            centered = Sub (h, mean)
            column = Constant <value = int64[4] {{-1, 4, 1, 1}}> ()
            factor = Reshape (scale, column)
            n = Mul (centered, factor)
            y = Conv <kernel_shape = [3, 3]> (n, w2)
        }}"""
    )


def test_check_accepts_what_onnxjs_runs_at_opset_9(tmp_path):
    model = normalized_by_base_operators()
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 3, 6, 6)).astype(np.float32)}
    job = onnxjs_zoo._job(tmp_path / "net.onnx", model, [onnxjs_zoo._tensor(feeds["x"])])
    (answer,) = onnxjs_zoo._run([job], tmp_path / "jobs.json")
    assert onnxjs_zoo._outcome(answer, run(model, feeds)).status == "right"
    assert unsupported_nodes(ir.from_proto(model), find(onnxjs_zoo.PROFILE)) == []
