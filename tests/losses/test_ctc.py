"""CTC against torch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.errors import LabelError, NonFiniteError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from tests.losses.compare import compare, loss_model, run, session_of
from tests.losses.small import FLOAT, model_of, weight

rng = np.random.default_rng(3)


def draw(times: int, batch: int, classes: int, labels: int, blank: int = 0):
    """Return x, of which the model takes twice as log-probabilities, labels and lengths."""
    x = rng.standard_normal((times, batch, classes))
    x = np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True)) / 2
    targets = rng.integers(0, classes - 1, (batch, labels))
    targets = targets + (targets >= blank)
    targets[0, :2] = targets[0, 0]  # a repeated label needs a blank in between
    target_lengths = rng.integers(1, labels + 1, batch)
    target_lengths[0] = labels
    input_lengths = rng.integers(2 * labels + 1, times + 1, batch)
    input_lengths[0] = times
    return x.astype(np.float32), targets, input_lengths, target_lengths


def ctc(reduction: str = "mean", **options):
    return lambda x, t, i, n: F.ctc_loss(x, t, i, n, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_value_and_gradient(dynamic: bool, reduction: str) -> None:
    x, *targets = draw(12, 4, 5, 4)
    # torch's gradient is that of x before a log_softmax; applied here, both mean the same.
    compare(L.CTC(reduction=reduction), through_softmax(reduction), [x], targets, dynamic=dynamic)


def through_softmax(reduction: str, **options):
    """The definition, as sums over time in log space, differentiated by autograd."""

    def oracle(logp, labels, input_lengths, target_lengths):
        losses = [
            forward(logp[:, n], labels[n, : target_lengths[n]], int(input_lengths[n]), **options)
            for n in range(logp.shape[1])
        ]
        each = torch.stack(losses)
        if reduction == "none":
            return each
        if reduction == "sum":
            return each.sum()
        return (each / target_lengths.clamp_min(1)).mean()

    return oracle


def forward(logp, labels, length, blank=0):
    extended = [blank]
    for label in labels.tolist():
        extended += [label, blank]
    alpha = {0: logp[0, blank]}
    if len(extended) > 1:
        alpha[1] = logp[0, extended[1]]
    for t in range(1, length):
        new = {}
        for s, e in enumerate(extended):
            ways = [s, s - 1]
            if e != blank and s >= 2 and extended[s - 2] != e:
                ways.append(s - 2)
            terms = [alpha[r] for r in ways if r in alpha]
            if terms:
                new[s] = torch.logsumexp(torch.stack(terms), 0) + logp[t, e]
        alpha = new
    last = [alpha[s] for s in (len(extended) - 1, len(extended) - 2) if s in alpha]
    return -torch.logsumexp(torch.stack(last), 0)


def test_batch_first() -> None:
    x, *targets = draw(9, 3, 5, 4)
    oracle = through_softmax("mean")
    compare(
        *(L.CTC(batch_first=True), lambda x, *rest: oracle(x.transpose(0, 1), *rest)),
        *([x.transpose(1, 0, 2)], targets),
    )
    with pytest.raises(ShapeError, match=r"\[T, N, C\], or with batch_first=True \[N, T, C\]"):
        loss_model(L.CTC(), [x[0]], targets)


@pytest.mark.parametrize("blank", [0, 4, 2])
def test_values_are_torchs(blank: int) -> None:
    x, *targets = draw(14, 5, 5, 5, blank)
    feeds = {"x0": x, **{f"t{i}": t for i, t in enumerate(targets)}}
    for reduction in ("mean", "sum", "none"):
        outputs = run(loss_model(L.CTC(blank=blank, reduction=reduction), [x], targets), feeds)
        logp = torch.tensor(2 * x, dtype=torch.float64)
        expected = ctc(reduction, blank=blank)(logp, *map(torch.tensor, targets))
        np.testing.assert_allclose(outputs["each"], expected.numpy(), rtol=1e-5)


def test_gradient_of_logits_is_torchs() -> None:
    """With the log_softmax in the model, as torch assumes in its own gradient."""
    _, labels, input_lengths, target_lengths = draw(12, 4, 5, 4)
    logits = rng.standard_normal((12, 4, 5)).astype(np.float32)

    class Softened(L.CTC):
        def build(self, op, prediction, *targets):
            return super().build(op, op.LogSoftmax(prediction, axis=-1), *targets)

    targets = [labels, input_lengths, target_lengths]
    compare(
        Softened(),
        lambda x, *rest: ctc()(x.log_softmax(-1), *rest),
        [logits],
        targets,
    )


def test_padding_may_be_anything() -> None:
    x, labels, input_lengths, target_lengths = draw(12, 4, 5, 4)
    session = session_of(loss_model(L.CTC(), [x], [labels, input_lengths, target_lengths]))
    results = []
    for padding in (0, -1, 99):
        padded = np.where(np.arange(4) < target_lengths[:, None], labels, padding)
        feeds = {"x0": x, "t0": padded, "t1": input_lengths, "t2": target_lengths}
        results.append(session.run(None, feeds))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_labels_at_all() -> None:
    x, labels, input_lengths, _ = draw(9, 3, 4, 4)
    lengths = np.array([0, 2, 0])
    compare(L.CTC(), through_softmax("mean"), [x], [labels, input_lengths, lengths])


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_impossible_sequences(zero_infinity: bool) -> None:
    x, labels, _, target_lengths = draw(9, 2, 4, 4)
    labels[0] = 1  # four equal labels need seven steps
    target_lengths[:] = 4
    lengths = np.array([5, 9])
    loss = L.CTC(reduction="none", zero_infinity=zero_infinity)
    feeds = {"x0": x, "t0": labels, "t1": lengths, "t2": target_lengths}
    outputs = run(loss_model(loss, [x], [labels, lengths, target_lengths]), feeds)
    arguments = (torch.tensor(v) for v in (2 * x, labels, lengths, target_lengths))
    expected = ctc("none", zero_infinity=zero_infinity)(*arguments)
    np.testing.assert_allclose(outputs["each"], expected.numpy(), rtol=1e-5)
    assert np.all(outputs["x0_grad"][:, 0] == 0.0)
    assert np.any(outputs["x0_grad"][:, 1] != 0.0)
    assert np.all(np.isfinite(outputs["x0_grad"]))


def test_long_and_certain_sequences_stay_finite() -> None:
    times, batch = 300, 2
    x = np.full((times, batch, 3), -5e3, np.float32)
    x[:, :, 0] = 0.0
    labels = np.array([[1, 2, 1], [2, 2, 1]])
    targets = [labels, np.full(batch, times), np.full(batch, 3)]
    feeds = {"x0": x, **{f"t{i}": t for i, t in enumerate(targets)}}
    outputs = run(loss_model(L.CTC(reduction="none"), [x], targets), feeds)
    logp = torch.tensor(2 * x, dtype=torch.float64)
    expected = ctc("none")(logp, *map(torch.tensor, targets))
    np.testing.assert_allclose(outputs["each"], expected.numpy(), rtol=1e-5)
    assert np.all(np.isfinite(outputs["x0_grad"]))


def test_joined_labels_are_refused() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    x = op.input("x", ir.DataType.FLOAT, ["t", "n", 5])
    labels = op.input("labels", ir.DataType.INT64, ["all"])
    lengths = op.input("lengths", ir.DataType.INT64, ["n"])
    with pytest.raises(ShapeError, match=r"CTC does not accept labels labels: INT64\[all\]"):
        L.CTC().build(op, x, labels, lengths, lengths)


@pytest.fixture(scope="module")
def trainer() -> onnxtrain.Trainer:
    """Return a net of x [batch, 6, 3] with four classes per time step."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 6, 3])
        scores = op.MatMul(x, weight(op, "w", rng.standard_normal((3, 4)).astype(np.float32)))
        return {"y": op.Transpose(op.LogSoftmax(scores, axis=-1), perm=[1, 0, 2])}

    return onnxtrain.Trainer(onnxtrain.build(model_of(build), loss="ctc", optimizer="sgd"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": [[1, 2], [3, 0]]}, LabelError, r"'labels' has 0 in row 1.*0 is the blank"),
        ({"labels": [[1, 2], [3, 4]]}, LabelError, r"'labels' has 4 in row 1.* 4 classes"),
        ({"labels": [[-1, 2], [3, 1]]}, LabelError, r"'labels' has -1 in row 0"),
        (
            {"labels": [[1, 2], [3, 3]], "input_lengths": [6, 2]},
            NonFiniteError,
            r"a blank between 1 equal neighbors need 3 .* 'input_lengths' has 2 in row 1.*zero_inf",
        ),
        (
            {"labels": [[1, 2], [3, 1]], "target_lengths": [2, 3]},
            NonFiniteError,
            r"'target_lengths' has 3 in row 1.*; 'labels' has 2 columns",
        ),
    ],
)
def test_sequences_that_cannot_be_aligned(
    trainer: onnxtrain.Trainer, change: dict, error: type[Exception], message: str
) -> None:
    data = {"labels": [[1, 2], [3, 0]], "input_lengths": [6, 6], "target_lengths": [2, 1]}
    lengths = {"target_lengths": [2, 2]} if "labels" in change else {}
    data = {n: np.array(v) for n, v in (data | lengths | change).items()}
    data["x"] = rng.standard_normal((2, 6, 3)).astype(np.float32)
    with pytest.raises(error, match=f"(?s){message}"):
        trainer.fit(data, epochs=1, batch_size=2, shuffle=False, progress=False)
