"""The public contract: names and order of inputs and outputs, what `wrt` means, the values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

import onnxtrain
from tests.cases.evaluate import stock
from tests.small_nets import LOSS, NET, PARAMETERS, names, numbers, parse


def net(x, ids, w, b, table):
    y = torch.tanh(x @ w + b + table[ids])
    return y, torch.linalg.vector_norm(y, dim=1)


def feeds() -> list[np.ndarray]:
    (x,) = numbers((4, 3))
    return [x, np.array([0, 2, 2, 4]), *onnxtrain.parameters(parse(NET)).values()]


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    wide = [torch.tensor(a) for a in arrays]
    return [t.double().requires_grad_() if t.is_floating_point() else t for t in wide]


# -- vjp -----------------------------------------------------------------------------------


def test_vjp_inputs_and_outputs() -> None:
    model = onnxtrain.vjp(parse(NET))
    assert names(model.graph.input) == ["x", "ids", *PARAMETERS, "y_grad", "norm_grad"]
    assert names(model.graph.output) == ["y", "norm", "best", *(f"{p}_grad" for p in PARAMETERS)]
    assert not {*PARAMETERS} & {*names(model.graph.initializer)}
    shapes = {v.name: v.type for v in (*model.graph.input, *model.graph.output)}
    for name in (*PARAMETERS, "y", "norm"):
        assert shapes[f"{name}_grad"] == shapes[name]
    assert (model.ir_version, model.producer_name) == (10, "onnxtrain")
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]


def test_vjp_numbers() -> None:
    dy, dnorm = numbers((4, 2), (4,))
    values = feeds()
    y, norm, best, *grads = stock(onnxtrain.vjp(parse(NET)))([*values, dy, dnorm])
    leaves = tensors(values)
    outputs = net(*leaves)
    np.testing.assert_allclose(y, outputs[0].detach(), rtol=1e-5)
    np.testing.assert_array_equal(best, outputs[0].argmax(1))
    torch.autograd.backward(outputs, [torch.tensor(dy).double(), torch.tensor(dnorm).double()])
    for ours, leaf in zip(grads, leaves[2:], strict=True):
        np.testing.assert_allclose(ours, leaf.grad, rtol=1e-4, atol=1e-6)
    assert norm.shape == (4,)


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (None, PARAMETERS),
        ("table", ["table"]),
        (["table", "fc.bias"], ["table", "fc.bias"]),
        ("fc.*", ["fc.weight", "fc.bias"]),
        (["*.bias", "fc.*"], ["fc.bias", "fc.weight"]),
        (["table", "table"], ["table"]),
        (["x", "fc.bias"], ["x", "fc.bias"]),
        (["fc.bias", "x"], ["fc.bias", "x"]),
        ("fc.[wb]*", ["fc.weight", "fc.bias"]),
        (("unused",), ["unused"]),
    ],
    ids=str,
)
def test_wrt(wrt: str | list[str] | None, expected: list[str]) -> None:
    model = onnxtrain.vjp(parse(NET), wrt)
    lifted = [n for n in expected if n != "x"]
    assert names(model.graph.input) == ["x", "ids", *lifted, "y_grad", "norm_grad"]
    assert names(model.graph.output)[3:] == [f"{n}_grad" for n in expected]
    assert list(onnxtrain.parameters(parse(NET), wrt)) == lifted


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (None, ["y", "norm"]),
        ("norm", ["norm"]),
        (["norm", "y"], ["norm", "y"]),
        ("*", ["y", "norm"]),
    ],
    ids=str,
)
def test_outputs(outputs: str | list[str] | None, expected: list[str]) -> None:
    model = onnxtrain.vjp(parse(NET), "table", outputs)
    assert names(model.graph.input)[3:] == [f"{n}_grad" for n in expected]
    assert names(model.graph.output) == ["y", "norm", "best", "table_grad"]


def test_frozen_parameters_stay_in_the_model() -> None:
    model = onnxtrain.vjp(parse(NET), "fc.bias")
    assert {"fc.weight", "table"} <= {*names(model.graph.initializer)}
    assert "unused" not in names(model.graph.initializer)


def test_names_that_are_taken_get_a_number() -> None:
    text = """g (float[2] x, float[2] y_grad) => (float[2] y, float[2] x_grad) {
        p = Mul(x, y_grad)  x_grad = Neg(p)  y = Mul(x, p)
    }"""
    model = onnxtrain.vjp(parse(text), ["x", "y_grad"])
    # Cotangents first, in output order; then gradients.
    assert names(model.graph.input) == ["x", "y_grad", "y_grad.2", "x_grad_grad"]
    assert names(model.graph.output) == ["y", "x_grad", "x_grad.2", "y_grad_grad"]


def test_the_second_taken_name_gets_the_next_number() -> None:
    model = parse("g (float[2] x, float[2] p) => (float[2] y) { y = Mul(x, p) }")
    model.graph.input[1].name = model.graph.node[0].input[1] = "y_grad"
    model.graph.input.add().CopyFrom(model.graph.input[1])
    model.graph.input[2].name = "y_grad.2"
    made = onnxtrain.vjp(model, "x")
    assert names(made.graph.input) == ["x", "y_grad", "y_grad.2", "y_grad.3"]


def test_vjp_of_a_vjp() -> None:
    first = onnxtrain.vjp(parse(NET), ["fc.weight", "x"], "norm")
    assert names(first.graph.input) == ["x", "ids", "fc.weight", "norm_grad"]
    second = onnxtrain.vjp(first, ["fc.weight", "norm_grad"], "fc.weight_grad")
    assert names(second.graph.input) == [*names(first.graph.input), "fc.weight_grad_grad"]
    assert names(second.graph.output) == [
        *names(first.graph.output),
        "fc.weight_grad.2",
        "norm_grad_grad",
    ]
    x, ids, w, b, table = feeds()
    dnorm, u = numbers((4,), (3, 2))
    *_, dw, ddnorm = stock(second)([x, ids, w, dnorm, u])

    xt, it, wt, bt, tt = tensors([x, ids, w, b, table])
    ct = torch.tensor(dnorm).double().requires_grad_()
    (once,) = torch.autograd.grad((net(xt, it, wt, bt, tt)[1] * ct).sum(), wt, create_graph=True)
    expected = torch.autograd.grad((once * torch.tensor(u).double()).sum(), [wt, ct])
    np.testing.assert_allclose(dw, expected[0].detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ddnorm, expected[1].detach(), rtol=1e-4, atol=1e-5)


def test_unreachable_values_get_zeros() -> None:
    text = "g (float[N,2] x, float[2] z) => (float[N,2] y, float[2] o) { y = Neg(x)  o = Exp(z) }"
    made = onnxtrain.vjp(parse(text), ["x", "z"], "y")
    x, z, dy = numbers((3, 2), (2,), (3, 2))
    _, _, dx, dz = stock(made)([x, z, dy])
    np.testing.assert_array_equal(dx, -dy)
    np.testing.assert_array_equal(dz, np.zeros(2))
    made = onnxtrain.vjp(parse(text), ["x", "z"], "o")
    _, _, dx, _ = stock(made)([x, z, z])
    np.testing.assert_array_equal(dx, np.zeros((3, 2)))


def test_nothing_flows_through_integers() -> None:
    text = """g (float[4] x, float[2] w) => (float[4] y) {
        f = Floor(x)  i = Cast <to = 7> (f)  back = Cast <to = 1> (i)
        two = Constant <value_int = 2> ()  m = Mod(i, two)  p = Gather(w, m)
        t = Mul(x, back)  y = Mul(t, p)
    }"""
    x, w, dy = np.float32([0.5, 1.5, 2.25, 3.5]), np.float32([2, 3]), np.ones(4, np.float32)
    _, dx, dw = stock(onnxtrain.vjp(parse(text), ["x", "w"]))([x, w, dy])
    np.testing.assert_allclose(dx, np.floor(x) * w[[0, 1, 0, 1]])
    np.testing.assert_allclose(dw, [2.25 * 2, 1.5 * 1 + 3.5 * 3])


def test_values_used_many_times_and_parts_not_used() -> None:
    text = """g (float[6] x) => (float[2] y) {
        n = Constant <value_ints = [2, 2, 2]> ()
        a, b, c = Split <axis = 0> (x, n)
        p = Mul(a, a)  q = Mul(p, a)  r = Add(q, c)  s = Add(r, a)  y = Add(s, p)
    }"""
    (x, dy) = numbers((6,), (2,))
    _, dx = stock(onnxtrain.vjp(parse(text), "x"))([x, dy])
    a = x[:2]
    expected = np.concatenate([(3 * a * a + 1 + 2 * a) * dy, np.zeros(2), dy])
    np.testing.assert_allclose(dx, expected, rtol=1e-5)


def test_an_output_that_is_an_input() -> None:
    made = onnxtrain.vjp(parse("g (float[2] x) => (float[2] y) { y = Identity(x) }"), "x")
    x, dy = numbers((2,), (2,))
    np.testing.assert_array_equal(stock(made)([x, dy]), [x, dy])


@pytest.mark.parametrize("kind", ["path", "str", "bytes", "proto", "ir"])
def test_every_source_gives_the_same(kind: str, tmp_path: Path) -> None:
    proto = parse(NET)
    path = tmp_path / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    source = {
        "path": path,
        "str": str(path),
        "bytes": proto.SerializeToString(),
        "proto": proto,
        "ir": ir.from_proto(proto),
    }[kind]
    assert onnxtrain.vjp(source) == onnxtrain.vjp(proto)


@pytest.mark.parametrize("function", [onnxtrain.vjp, onnxtrain.jvp, onnxtrain.explain])
def test_the_argument_is_not_changed(function) -> None:
    proto, model = parse(NET), ir.from_proto(parse(NET))
    before = proto.SerializeToString(), ir.to_proto(model).SerializeToString()
    function(proto, ["fc.*", "x"])
    function(model, ["fc.*", "x"])
    assert (proto.SerializeToString(), ir.to_proto(model).SerializeToString()) == before


def test_the_same_bytes_again() -> None:
    once, again = (onnxtrain.vjp(parse(NET)).SerializeToString() for _ in range(2))
    assert once == again


# -- parameters ------------------------------------------------------------------------------


def test_parameters_are_values_of_their_own() -> None:
    model = parse(NET)
    parameters = onnxtrain.parameters(model)
    assert list(parameters) == PARAMETERS
    np.testing.assert_array_equal(parameters["fc.bias"], np.float32([0.5, -0.5]))
    parameters["fc.bias"][:] = 0
    np.testing.assert_array_equal(onnxtrain.parameters(model)["fc.bias"], np.float32([0.5, -0.5]))


def test_running_statistics_are_no_parameters() -> None:
    model = parse("""g (float[N,2,3] x) => (float[N,2,3] y)
        <float[2] s={1.0,1.0}, float[2] b={0.0,0.0}, float[2] m={0.0,0.0}, float[2] v={1.0,1.0}>
        { y = BatchNormalization(x, s, b, m, v) }""")
    assert list(onnxtrain.parameters(model)) == ["s", "b"]
    assert list(onnxtrain.parameters(model, "*")) == ["s", "b", "m", "v"]


# -- grad ----------------------------------------------------------------------------------


def test_grad_takes_the_output_called_loss() -> None:
    made = onnxtrain.grad(parse(LOSS))
    assert names(made.graph.input) == ["x", "w"]
    assert names(made.graph.output) == ["y", "loss", "other", "w_grad"]
    (x,) = numbers((5, 2))
    np.testing.assert_allclose(stock(made)([x, np.float32([1, 2])])[-1], x.sum(0), rtol=1e-5)


def test_grad_of_an_output_with_one_element() -> None:
    made = onnxtrain.grad(parse(LOSS), ["x"], "other")
    assert names(made.graph.input) == ["x"]
    (x,) = numbers((5, 2))
    np.testing.assert_allclose(stock(made)([x])[-1], np.tile([2.0, 4.0], (5, 1)))


def test_grad_takes_the_only_output() -> None:
    made = onnxtrain.grad(
        parse("g (float[3] x) => (float s) { s = ReduceMax <keepdims=0> (x) }"), "x"
    )
    assert names(made.graph.output) == ["s", "x_grad"]


# -- jvp -----------------------------------------------------------------------------------


def test_jvp_inputs_and_outputs() -> None:
    made = onnxtrain.jvp(parse(NET), ["table", "x"])
    assert names(made.graph.input) == ["x", "ids", "table", "table_tangent", "x_tangent"]
    assert names(made.graph.output) == ["y", "norm", "best", "y_tangent", "norm_tangent"]
    made = onnxtrain.jvp(parse(NET), outputs="norm")
    assert names(made.graph.output) == ["y", "norm", "best", "norm_tangent"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # inside torch.func
def test_jvp_numbers() -> None:
    values = feeds()
    tangents = numbers(*(v.shape for v in values[2:]), values[0].shape)
    made = onnxtrain.jvp(parse(NET), [*PARAMETERS, "x"])
    *_, dy, dnorm = stock(made)([*values, *tangents])
    x, ids, w, b, table = (torch.tensor(v) for v in values)
    wide = [t.double() for t in (w, b, table, x)]
    _, expected = torch.func.jvp(
        lambda w, b, table, x: net(x, ids, w, b, table),
        tuple(wide),
        tuple(torch.tensor(t).double() for t in tangents),
    )
    np.testing.assert_allclose(dy, expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dnorm, expected[1], rtol=1e-4, atol=1e-6)


def test_jvp_of_what_does_not_depend() -> None:
    text = "g (float[2] x, float[2] z) => (float[2] y, float[2] o) { y = Neg(x)  o = Exp(z) }"
    made = onnxtrain.jvp(parse(text), "x")
    x, z, t = numbers((2,), (2,), (2,))
    *_, dy, do = stock(made)([x, z, t])
    np.testing.assert_array_equal(dy, -t)
    np.testing.assert_array_equal(do, np.zeros(2))


# -- explain -------------------------------------------------------------------------------


def test_explain() -> None:
    report = onnxtrain.explain(parse(NET))
    assert report.differentiable
    assert list(report.parameters) == PARAMETERS
    assert report.parameters["fc.bias"] == "FLOAT[2]"
    assert report.frozen == {"unused": "no node reads it"}
    ways = {n.name: n.how for n in report.nodes}
    assert ways == {
        "h": "rule",
        "i": "rule",
        "e": "rule",
        "s": "rule",
        "y": "rule",
        "norm": "rule",
        "best": "constant",
    }
    assert report.to_dict()["differentiable"] is True
    assert str(report).splitlines()[:2] == ["opset 21, 7 nodes", "differentiable"]


def test_explain_tells_what_is_frozen_and_lost() -> None:
    report = onnxtrain.explain(parse(NET), "fc.*")
    assert report.frozen == {"table": "not in wrt", "unused": "no node reads it"}
    assert report.lost == ()


def test_explain_tells_what_is_repaired() -> None:
    model = parse("""g (float[4] x) => (float[4] y) <float[4] w={1.0,2.0,3.0,4.0}>
        { h = Mul(x, w)  y = CastLike(h, x) }""")
    assert onnxtrain.explain(model).repairs == ("CastLike became Cast: 1 node(s)",)
