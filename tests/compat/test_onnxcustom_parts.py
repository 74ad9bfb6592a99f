"""Losses, penalties, learning rates, loaders and graph helpers of onnxcustom."""

import importlib
import itertools
import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession

from onnxtrain.compat.onnxcustom import (
    BaseLearningLoss,
    BaseLearningPenalty,
    BaseLearningRate,
    DerivativeOptions,
    ElasticLearningLoss,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtDataLoader,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    onnx_derivative,
    onnx_rename_weights,
    save_onnx_graph,
)
from onnxtrain.errors import CompatError

RNG = np.random.default_rng(0)
ADD = """
<ir_version: 10, opset_import: ["": 21]>
g (float[n, 4] X) => (float[n, 4] Y) <float[4] a = {1, 2, 3, 4}, float[4] b = {4, 3, 2, 1}>
{ h = Mul(X, a)  Y = Add(h, b) }
"""


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(ADD)


def numeric(loss, expected, predicted, step=1e-3):
    grads = np.zeros_like(predicted)
    for index in np.ndindex(predicted.shape):
        for sign in (1, -1):
            moved = predicted.copy()
            moved[index] += sign * step
            value = loss.loss_gradient("cpu", expected, moved)[0].numpy().item()
            grads[index] += sign * value / (2 * step)
    return grads


@pytest.mark.parametrize("name", ["square", "absolute", "elastic", "log"])
def test_gradients_of_losses_have_the_right_sign(name):
    loss = BaseLearningLoss.select(name)
    predicted = RNG.normal(size=(6, 1)).astype(np.float32)
    expected = RNG.normal(size=(6, 1)).astype(np.float32)
    if name == "log":
        expected = (expected > 0).astype(np.int64)
    total, grad = loss.loss_gradient("cpu", expected, predicted)
    np.testing.assert_allclose(
        grad.numpy(), numeric(loss, expected, predicted), rtol=1e-2, atol=1e-2
    )
    each = loss.loss_scores("cpu", expected, predicted).numpy()
    assert total.numpy().shape == (1, 1)
    assert each.sum() == pytest.approx(total.numpy().item(), rel=1e-5)
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_weights_scale_losses():
    loss = ElasticLearningLoss(0.3, 0.7)
    loss.build_onnx_function(weight_name="w")
    predicted, expected = RNG.normal(size=(2, 5, 1)).astype(np.float32)
    weight = np.arange(5).astype(np.float32)
    plain = loss.loss_scores("cpu", expected, predicted).numpy().ravel()
    weighted = loss.loss_scores("cpu", expected, predicted, weight).numpy().ravel()
    np.testing.assert_allclose(weighted, plain * weight, rtol=1e-6)


def test_penalties_add_to_losses():
    penalty = BaseLearningPenalty.select("elastic", l1=0.25, l2=0.5)
    w = np.array([1.0, -2.0], np.float32)
    got = penalty.penalty_loss("cpu", np.array([[1.0]], np.float32), w).numpy().item()
    assert got == pytest.approx(1 + 0.25 * 3 + 0.5 * 5)
    assert BaseLearningPenalty.select(None).penalty_loss("cpu", got, w) == got
    updated = penalty.update_weights(0, "cpu", w).numpy()
    np.testing.assert_allclose(updated, w - (0.25 * np.sign(w) + 2 * 0.5 * w), atol=1e-6)
    graphs = penalty.save_onnx_graph(bytes)
    assert set(graphs) == {"penalty_onnx_", "penalty_grad_onnx_"}
    with pytest.raises(ValueError, match="unknown penalty"):
        BaseLearningPenalty.select("l3")


def test_learning_rates():
    rate = LearningRateSGD(0.5, power_t=0.5)
    np.testing.assert_allclose(list(rate.loop(4)), [0.5, 0.5 / 2**0.5, 0.5 / 3**0.5, 0.25])
    assert list(LearningRateSGD(0.5, learning_rate="constant").loop(3)) == [0.5] * 3
    optimal = list(LearningRateSGD(0.01, learning_rate="optimal").loop(1000))
    assert optimal[0] == 0.01
    assert all(a > b for a, b in itertools.pairwise(optimal))
    # 1 / alpha = 1e4 and sqrt(1 / sqrt(alpha)) = 10: t0 = 1e4 / (10 / 22) = 22,000.
    assert optimal[-1] == pytest.approx(0.01 * 22000 / (22000 + 999))
    assert BaseLearningRate.select(0.1) == LearningRateSGD(0.1)
    assert isinstance(BaseLearningRate.select("Nesterov"), LearningRateSGDNesterov)
    with pytest.raises(ValueError, match="unknown schedule"):
        LearningRateSGD(learning_rate="linear")


@pytest.mark.parametrize("nesterov", [True, False])
def test_update_with_momentum(nesterov):
    rate = LearningRateSGDNesterov(0.1, nesterov=nesterov, momentum=0.9)
    rate.init_learning_rate()
    w, g, v = RNG.normal(size=(3, 2, 3)).astype(np.float32)
    new, speed = rate.update_weights(w, g, 5, v)
    assert speed is not None
    z = 0.9 * v - 0.02 * g
    np.testing.assert_allclose(speed, z, rtol=1e-5)
    np.testing.assert_allclose(new, w + (0.9 * z - 0.02 * g if nesterov else z), rtol=1e-5)


def test_data_loader():
    x = np.arange(50).reshape(25, 2).astype(np.float32)
    y = np.arange(25).astype(np.float32)
    loader = OrtDataLoader(x, y, batch_size=10, random_iter=False)
    assert [int(b[1][0, 0]) for b in loader.iter_numpy()] == [0, 10, 15]
    assert all(len(b[0]) == 10 for b in loader.iter_numpy())
    assert loader.desc == [((25, 2), np.float32), ((25, 1), np.float32)]
    copy = pickle.loads(pickle.dumps(OrtDataLoader(x, y, sample_weight=y, batch_size=10)))
    np.random.seed(0)
    batches = list(copy.iter_ortvalue())
    assert [b[0].shape() for b in batches] == [[10, 2]] * 3
    native = importlib.import_module("onnxruntime.capi._pybind_state")
    assert all(isinstance(v, native.OrtValue) for b in batches for v in b)
    np.random.seed(0)
    starts = [np.random.randint(0, 15) for _ in range(3)]  # as onnxcustom draws them
    assert [int(b[1].numpy()[0, 0]) for b in batches] == starts
    for features, label, weight in ([v.numpy() for v in b] for b in batches):
        np.testing.assert_array_equal(features[:, 0] / 2, label.ravel())
        np.testing.assert_array_equal(weight, label.ravel())
    assert len(copy) == len(copy.data_ort[0].numpy()) == 25
    session = InferenceSession(add_loss_output(model()).SerializeToString())
    wide = OrtDataLoader(np.ones((6, 4), np.float32), np.ones((6, 4), np.float32), batch_size=4)
    bind = session.io_binding()
    for n in wide.iter_bind(bind, ["X", "label", "Learning_Rate"]):
        bind.bind_output("loss")
        session.run_with_iobinding(bind)
        assert (n, bind.get_outputs()[0].numpy().item()) == (4, 16 * 4.0**2)
    with pytest.raises(NotImplementedError, match="learning rate, got"):
        next(wide.iter_bind(bind, ["X"]))


def run(onx: onnx.ModelProto, **feeds) -> dict[str, Any]:
    session = InferenceSession(onx.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def test_derivative_options(tmp_path):
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    a, b = np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 1], np.float32)
    ones = np.ones((3, 4), np.float32)
    derivative = onnx_derivative(model())
    assert [i.name for i in derivative.graph.input] == ["X", "a", "b", "Y_grad"]
    got = run(derivative, X=x, a=a, b=b, Y_grad=ones)
    assert list(got) == ["X_grad", "a_grad", "b_grad"]
    np.testing.assert_allclose(got["a_grad"], x.sum(0), rtol=1e-5)

    both = onnx_derivative(
        model(), weights=[], options=DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    )
    got = run(both, X=x)
    np.testing.assert_allclose(got["X_grad"], ones * a)
    np.testing.assert_allclose(got["Y"], x * a + b, rtol=1e-6)

    path = tmp_path / "gradient.onnx"
    with_loss = add_loss_output(model())
    onnx_derivative(
        with_loss, options=DerivativeOptions.Loss, label="label", loss="loss", path_name=path
    )
    got = run(onnx.load(path), X=x, label=ones, a=a, b=b)
    np.testing.assert_allclose(got["b_grad"], 2 * (x * a + b - 1).sum(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (1, TypeError),
        (DerivativeOptions.FillGrad, ValueError),
        (DerivativeOptions.Loss, ValueError),
        (DerivativeOptions.KeepYieldOp | DerivativeOptions.KeepOutputs, ValueError),
    ],
)
def test_options_that_do_not_fit(options, error):
    with pytest.raises(error):
        onnx_derivative(model(), options=options)


def test_yield_op_is_a_function_that_returns_ones():
    derivative = onnx_derivative(model(), options=DerivativeOptions.KeepYieldOp)
    assert [n.op_type for n in derivative.graph.node].count("YieldOp") == 1
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    got = run(derivative, X=x, a=np.array([1, 2, 3, 4], np.float32), b=np.zeros(4, np.float32))
    np.testing.assert_allclose(got["a_grad"], x.sum(0), rtol=1e-5)


def test_batch_axes_without_a_name():
    """skl2onnx writes them; the sizes of gradients must not come from the gradients."""
    onx = model()
    for value in (onx.graph.input[0], onx.graph.output[0]):
        value.type.tensor_type.shape.dim[0].Clear()
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    got = run(onnx_derivative(onx, weights=[], options=options), X=x)
    assert list(got) == ["Y", "X_grad"]
    np.testing.assert_allclose(got["X_grad"], np.tile(np.array([1, 2, 3, 4], np.float32), (3, 1)))


def test_derivative_of_outputs_of_a_model_without_its_loss(tmp_path):
    path, x = tmp_path / "gradient.onnx", RNG.normal(size=(3, 4)).astype(np.float32)
    options = {"options": DerivativeOptions.Loss, "loss": "loss", "path_name": path}
    onnx_derivative(model(), label="Y", **options)
    a, b = np.array([1, 2, 3, 4], np.float32), np.zeros(4, np.float32)
    got = run(onnx.load(path), X=x, a=a, b=b, Y_grad=2 * x)
    np.testing.assert_allclose(got["X_grad"], 2 * x * a, rtol=1e-6)
    with pytest.raises(CompatError, match=r"unknown output: Z .*\nhint: add_loss_output"):
        onnx_derivative(model(), label="Z", **options)


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        ("squared_error", lambda d: d**2),
        ("l1", np.abs),
        ("elastic", lambda d: 0.5 * np.abs(d) + 0.5 * d**2),
    ],
)
def test_add_loss_output(score, wanted):
    onx = add_loss_output(
        model(), score, weight_name="weight", penalty={"a": {"l1": 0.5, "l2": 0.25}, "b": 2.0}
    )
    x, label = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    weight = np.array([1, 2, 3], np.float32)
    got = run(onx, X=x, label=label, weight=weight)
    assert list(got) == ["loss", "Y"]
    assert got["loss"].shape == (1, 1)
    each = wanted(got["Y"] - label) * weight[:, None]
    assert got["loss"].item() == pytest.approx(each.sum() + 5 + 7.5 + 60, rel=1e-5)


def test_add_log_loss():
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n, 2] X) => (float[n, 2] p) { label = Identity(X) p = Softmax(label) }"""
    with_loss = add_loss_output(onnx.parser.parse_model(text), "log", weight_name="w", eps=1e-3)
    assert [x.name for x in with_loss.graph.input] == ["X", "label", "w"]
    x, y = RNG.normal(size=(5, 2)).astype(np.float32), np.array([0, 1, 1, 0, 1])
    x[0] = (-50, 50)
    w = np.arange(5, dtype=np.float32)
    got = run(with_loss, X=x, label=y.reshape(-1, 1), w=w)
    assert got["loss"].shape == (1, 1)
    wanted = -np.log(np.clip(got["p"], 1e-3, 1 - 1e-3)[np.arange(5), y])
    assert got["loss"].item() == pytest.approx((wanted * w).mean(), rel=1e-5)
    without_rank = onnx.parser.parse_model(text)
    for value in (*without_rank.graph.input, *without_rank.graph.output):
        value.type.tensor_type.ClearField("shape")
    got = run(add_loss_output(without_rank, "log", eps=1e-3), X=x, label=y.reshape(-1, 1))
    assert got["loss"].item() == pytest.approx(wanted.mean(), rel=1e-5)
    with pytest.raises(NotImplementedError, match="unknown score"):
        add_loss_output(model(), "huber")


def test_rename_and_save(tmp_path):
    renamed = onnx_rename_weights(model())
    assert [t.name for t in renamed.graph.initializer] == ["I0_a", "I1_b"]
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(run(renamed, X=x)["Y"], run(model(), X=x)["Y"])
    estimator = OrtGradientForwardBackwardOptimizer(model(), max_iter=1)
    estimator.fit(x, np.ones((2, 4), np.float32))
    content = estimator.save_onnx_graph(bytes)
    assert content["model_onnx"] == model().SerializeToString(deterministic=True)
    assert set(content["train_session_"]["cls_type_"]) == {
        "optimized_pre_grad_model",
        "trained_onnx",
    }
    files = estimator.save_onnx_graph(str(tmp_path))
    onnx.checker.check_model(onnx.load(files["learning_loss"]["loss_grad_onnx_"]))
    with pytest.warns(UserWarning, match="already exists"):
        save_onnx_graph(estimator, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        save_onnx_graph(estimator, str(tmp_path / "absent"))


def test_refusals():
    with pytest.raises(ValueError, match="duplicate name"):
        OrtGradientForwardBackward(model(), ["a", "a"])
    with pytest.raises(ValueError, match="unknown float initializer"):
        OrtGradientForwardBackward(model(), ["y"])
    with pytest.raises(ValueError, match="unknown provider"):
        OrtGradientForwardBackward(model(), providers=["NONE"])
    with pytest.raises(ValueError, match=r"alphabetical order .*\nhint: .*onnx_rename_weights"):
        OrtGradientForwardBackward(model(), ["b", "a"])
    x = np.ones((2, 4), np.float32)
    with pytest.raises(NotImplementedError, match="unknown optimizer"):
        OrtGradientForwardBackwardOptimizer(model(), training_optimizer_name="Adam").fit(x, x)
    with pytest.raises(ValueError, match=r"unknown float initializer: \['c'\]"):
        OrtGradientForwardBackwardOptimizer(model(), ["c"]).fit(x, x)
    with pytest.raises(RuntimeError, match="the model has the inputs X, label\nhint"):
        OrtGradientOptimizer(add_loss_output(model()), None).fit(x, x, np.ones(2, np.float32))
    for device, error in (("cpu2", ValueError), ("cuda:x", ValueError), (3, TypeError)):
        with pytest.raises(error):
            OrtDataLoader(x, x, device=device)
    with pytest.raises(NotImplementedError, match="momentum"):
        OrtGradientOptimizer(add_loss_output(model()), None, learning_rate="SGDNesterov")
    with pytest.raises(AttributeError, match="nothing is trained"):
        OrtGradientForwardBackwardOptimizer(model()).get_state()
