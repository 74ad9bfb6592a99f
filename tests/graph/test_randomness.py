"""Portable random numbers: statistical quality and reproducibility."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.modes import randomness
from onnxtrain.modes.randomness import portable_dropout, uniform_mask
from tests.cases.evaluate import reference, stock

ROWS, COLUMNS = 2048, randomness.COLUMNS


def model_of(shape, draw, symbols=None) -> onnx.ModelProto:
    """Return a model (rng, x) -> draw(op, x, rng)."""
    rng = ir.val("rng", ir.DataType.FLOAT, [2])
    x = ir.val("x", ir.DataType.FLOAT, list(symbols or shape))
    graph = ir.Graph([rng, x], [], nodes=[], opset_imports={"": 21}, name="g")
    graph.outputs.append(draw(OpBuilder(graph), x, rng))
    return ir.to_proto(ir.Model(graph, ir_version=10))


@functools.cache
def mask_session(shape, keep: float, node: int, symbols=None):
    """Return a mask as a function of (rng, x) on onnxruntime."""
    return stock(model_of(shape, lambda op, x, rng: uniform_mask(op, x, rng, node, keep), symbols))


def masks(shape, keep=0.5, seed=0, step=1, node=0, symbols=None) -> np.ndarray:
    """Return a mask as +1 and -1."""
    run = mask_session(tuple(shape), keep, node, symbols)
    (mask,) = run([np.array([seed, step]), np.zeros(shape)])
    assert mask.dtype == np.bool_
    return mask


def signs(**which) -> np.ndarray:
    """Return fair masks in rows of the generator, as +1 and -1."""
    return masks((ROWS, COLUMNS), **which) * 2.0 - 1.0


def correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the correlations of rows of ``a`` with rows of ``b``, in standard deviations."""
    return a @ b.T / np.sqrt(a.shape[1])


def assert_unrelated(a: np.ndarray, b: np.ndarray) -> None:
    """Assert that two masks agree elementwise only by chance: below 4.5 standard deviations."""
    deviations = (a * b).mean() * np.sqrt(a.size)
    assert abs(deviations) < 4.5, f"{deviations:.1f} standard deviations"


@pytest.mark.parametrize("keep", [0.05, 0.1, 0.5, 0.75, 0.9, 0.999])
def test_mean_and_variance_over_steps(keep: float) -> None:
    drawn = [masks((512, COLUMNS), keep, step=s).mean() for s in range(40)]
    one = np.sqrt(keep * (1 - keep) / (512 * COLUMNS))
    assert abs(np.mean(drawn) - keep) < 4.5 * one / np.sqrt(40) + 2.0**-15
    # The means vary as those of independent elements do: chi-squared with 39 degrees of freedom.
    assert 16 < np.sum((np.asarray(drawn) - np.mean(drawn)) ** 2) / one**2 < 76


def test_neighbors_are_unrelated() -> None:
    m = signs(seed=5, step=9)
    for lag in (1, 2, 3, 16, 100, 1023):
        assert_unrelated(m[:, lag:], m[:, :-lag])
        assert_unrelated(m[lag:], m[:-lag])
    assert_unrelated(m[1:, 1:] * m[:-1, :-1], m[1:, :-1] * m[:-1, 1:])  # squares of four


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_no_two_rows_or_columns_are_alike(side: str) -> None:
    m = signs(seed=1, step=2)
    m = m if side == "rows" else m.T
    c = correlations(m, m)
    c = c[np.triu_indices(len(c), 1)]
    assert abs(c).max() < 6.3  # of 2 million pairs 5.2 is usual; more is 1 in 1,000
    assert abs((c**2).mean() - 1) < 0.01
    assert abs((c**4).mean() - 3) < 0.1


def test_spectrum_is_that_of_noise() -> None:
    m = signs(seed=4, step=4)[:, ::2]
    values = np.sqrt(np.linalg.eigvalsh(m.T @ m))
    assert values[-1] < 1.02 * (np.sqrt(ROWS) + np.sqrt(COLUMNS / 2))
    assert values[0] > 0.97 * (np.sqrt(ROWS) - np.sqrt(COLUMNS / 2))


@pytest.mark.parametrize("pairs", ["steps", "seeds", "nodes"])
def test_other_streams_are_unrelated(pairs: str) -> None:
    name = pairs[:-1]
    shape = {"seed": 7, "step": 3, "node": 2}
    far = [1, 2, 3, 4095, 4096, 8192] if name != "node" else [1, 2, 3, 4, 8, 40]
    m = signs(**shape)
    for change in far:
        other = signs(**{**shape, name: shape[name] + change})
        assert_unrelated(m, other)
        c = correlations(m[:256], other)  # nor is it a shuffling of rows
        assert abs(c).max() < 6.3


def test_seed_and_step_are_independent() -> None:
    assert_unrelated(signs(seed=1, step=2), signs(seed=2, step=1))
    assert_unrelated(signs(seed=0, step=3), signs(seed=3, step=0))


def test_one_row_over_many_steps() -> None:
    m = np.stack([masks((4, 16), step=s).reshape(-1) for s in range(3000)]) * 2.0 - 1.0
    assert abs(m.mean(0)).max() * np.sqrt(3000) < 4.5
    for lag in (1, 2, 7):
        assert abs((m[lag:] * m[:-lag]).mean(0)).max() * np.sqrt(3000) < 4.7
    c = m.T @ m / np.sqrt(3000)
    assert abs(c[np.triu_indices(64, 1)]).max() < 5


def test_same_bits_on_another_evaluator() -> None:
    def both(op, x, rng):
        stream = randomness.RandomStream(op, rng)
        u = stream.uniform(x, 8)
        return op.Where(stream.mask(x, 3, 0.9), u, op.Neg(u))

    model = model_of((37, 211), both)
    for rng in ([0, 0], [1, 2], [16777215, 16777215], [123456, 9999999]):
        given = [np.array(rng), np.zeros((37, 211))]
        np.testing.assert_array_equal(stock(model)(given)[0], reference(model)(given)[0])


def test_shape_does_not_matter() -> None:
    flat = masks((6 * 345,), 0.7)
    np.testing.assert_array_equal(masks((6, 345), 0.7).reshape(-1), flat)
    np.testing.assert_array_equal(masks((6, 345), 0.7, symbols=("a", "b")).reshape(-1), flat)
    np.testing.assert_array_equal(masks((2, 3, 345), 0.7, symbols=("n", 3, 345)).ravel(), flat)
    np.testing.assert_array_equal(masks((5,), 0.7, symbols=("n",)), flat[:5])
    assert masks((0, 3), symbols=("n", 3)).shape == (0, 3)
    assert masks(()).shape == ()


def test_uniform_numbers() -> None:
    model = model_of((1000, 999), lambda op, x, rng: randomness.RandomStream(op, rng).uniform(x, 0))
    u = stock(model)([np.array([3, 4]), np.zeros((1000, 999))])[0].astype(np.float64).reshape(-1)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, 256, (0, 1))[0]
    expected = u.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 330  # 255 degrees of freedom
    assert len(np.unique(u)) > 0.95 * u.size


def test_normal_numbers() -> None:
    model = model_of((1000, 999), lambda op, x, rng: randomness.RandomStream(op, rng).normal(x, 0))
    z = stock(model)([np.array([3, 4]), np.zeros((1000, 999))])[0].astype(np.float64)
    noise = 4.5 / np.sqrt(z.size)
    assert abs(z.mean()) < noise
    assert abs(z.var() - 1) < noise * np.sqrt(2)
    assert abs((z**3).mean()) < noise * np.sqrt(15)
    assert abs((z**4).mean() - 3) < noise * np.sqrt(96)
    assert 4.2 < abs(z).max() < 5.9


HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'


def rewritten(text: str) -> ir.Model:
    """Parse a model and rewrite its random operators."""
    model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
    infer_shapes(model.graph, 21)
    return portable_dropout(model)


def checked(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a ModelProto that onnx's checker accepts."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


TWO = """g (float[n, 40] x) => (float[n, 40] z, bool[n, 40] m)
    <float p = {0.25}, float q = {0.5}, bool t = {1}>
    { y, m = Dropout (x, p, t)
      z = Dropout (y, q, t) }"""


def test_dropout_is_rewritten() -> None:
    model = rewritten(TWO)
    assert "Dropout" not in {n.op_type for n in model.graph.all_nodes()}
    assert [(x.name, x.dtype) for x in model.graph.inputs][1] == ("rng", ir.DataType.FLOAT)
    run = stock(checked(model))
    x = np.ones((300, 40))
    z, m = run([x, np.array([1, 1])])
    assert abs(m.mean() - 0.75) < 0.02
    assert set(np.unique(z)) == {0, np.float32(2 / 0.75)}
    assert abs((z != 0).mean() - 0.375) < 0.02
    assert not z[~m].any()
    again, other = run([x, np.array([1, 1])])[0], run([x, np.array([1, 2])])[0]
    np.testing.assert_array_equal(again, z)
    assert (other != z).any()
    np.testing.assert_array_equal(stock(checked(rewritten(TWO)))([x, np.array([1, 1])])[0], z)


def test_the_gradient_uses_the_same_mask() -> None:
    vjp = onnxtrain.vjp(checked(rewritten(TWO)), ["x"], ["z"])
    x, dz = np.ones((50, 40)), np.ones((50, 40))
    z, _, dx = stock(vjp)([x, np.array([1, 1]), dz])
    np.testing.assert_array_equal(dx, z)


def test_ratio_and_mode_at_run_time() -> None:
    model = rewritten("""g (float[n, 40] x, float p, bool t) => (float[n, 40] y)
        { y = Dropout (x, p, t) }""")
    run = stock(checked(model))
    x, rng = np.full((100, 40), 3.0), np.array([4, 5])
    np.testing.assert_array_equal(run([x, np.array(0.25), np.array(False), rng])[0], x)
    y = run([x, np.array(0.25), np.array(True), rng])[0]
    assert set(np.unique(y)) == {0, 4}
    assert abs((y != 0).mean() - 0.75) < 0.04


def test_nothing_to_rewrite() -> None:
    text = """g (float[n, 40] x) => (float[n, 40] z) <float p = {0.25}, bool t = {0}>
        { y = Dropout (x, p, t)
          z = Dropout (y) }"""
    model = rewritten(text)
    assert [x.name for x in model.graph.inputs] == ["x"]
    assert [n.op_type for n in model.graph] == ["Dropout", "Dropout"]


def test_the_other_random_operators() -> None:
    model = rewritten("""g (float[n, 50] x, float[n, 3] logits)
        => (float[n, 50] u, double[n, 50] z, float[300, 2] v, float[300, 2] w, float[n, 50] b,
            int32[n, 400] k)
        { u = RandomUniformLike <low = -1.0, high = 3.0> (x)
          z = RandomNormalLike <dtype = 11, mean = 2.0, scale = 0.5> (x)
          v = RandomUniform <shape = [300, 2]> ()
          w = RandomNormal <shape = [300, 2]> ()
          b = Bernoulli (x)
          k = Multinomial <sample_size = 400> (logits) }""")
    run = stock(checked(model))
    x = np.full((200, 50), 0.3)
    logits = np.log(np.tile([0.2, 0.5, 0.3], (200, 1)))
    u, z, v, w, b, k = run([x, logits, np.array([1, 1])])
    assert u.min() >= -1
    assert u.max() < 3
    assert abs(u.mean() - 1) < 0.06
    assert z.dtype == np.float64
    assert abs(z.mean() - 2) < 0.025
    assert abs(z.std() - 0.5) < 0.02
    assert abs(v.mean() - 0.5) < 0.06
    assert abs(w.std() - 1) < 0.12
    assert set(np.unique(b)) == {0, 1}
    assert abs(b.mean() - 0.3) < 0.025
    np.testing.assert_allclose(
        np.bincount(k.ravel(), minlength=3) / k.size, [0.2, 0.5, 0.3], atol=0.01
    )


def test_branches_and_loops() -> None:
    model = rewritten("""g (float[50, 40] x, bool c) => (float[50, 40] y, float[m, 50, 40] ys)
        <float p = {0.5}, bool t = {1}, int64 n = {3}, bool go = {1}>
        { y = If (c) <
            then_branch = a () => (float[50, 40] a0) { a0 = Dropout (x, p, t) },
            else_branch = b () => (float[50, 40] b0) { b0 = Dropout (x, p, t) }>
          ys = Loop (n, go) <
            body = l (int64 i, bool before) => (bool after, float[50, 40] l0)
              { after = Identity (before)
                l0 = Dropout (x, p, t) }> }""")
    run = stock(checked(model))
    x, rng = np.ones((50, 40)), np.array([2, 3])
    a, ys = run([x, np.array(True), rng])
    b = run([x, np.array(False), rng])[0]
    drawn = [v - 1 for v in (a, b, *ys)]
    for i, m in enumerate(drawn):
        assert abs(m.mean()) < 0.1
        for other in drawn[:i]:
            assert_unrelated(m, other)


def test_scan_raises() -> None:
    with pytest.raises(PrepareError, match="a random operator in a Scan"):
        rewritten("""g (float[5, 40] x) => (float[5, 40] y) <float p = {0.5}, bool t = {1}>
            { y = Scan <num_scan_inputs = 1,
                body = s (float[40] e) => (float[40] f) { f = Dropout (e, p, t) }> (x) }""")


def test_name_collision() -> None:
    with pytest.raises(PrepareError, match="a value called 'rng'"):
        rewritten("""g (float[5, 40] rng) => (float[5, 40] y) <float p = {0.5}, bool t = {1}>
            { y = Dropout (rng, p, t) }""")
