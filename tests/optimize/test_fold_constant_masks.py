"""fold_constant_masks: masks become constants for all rows of a batch, or vanish."""

from __future__ import annotations

import collections

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import parser
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.formula_tables import is_mask
from onnxtrain.graph.simplify import simplify
from onnxtrain.graph.simplify.constant_subgraphs import FoldableValues
from onnxtrain.optimize.attention_fusion import fold_constant_masks
from onnxtrain.torch import from_torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
# Token b, i sees b, j if j <= i, and if both are of one document, as counted by a running sum.
CAUSAL = """
    i = Range(zero, length, one)
    rows = Unsqueeze(i, last)
    before = LessOrEqual(i, rows)
    running = CumSum(starts, one)
    a = Unsqueeze(running, last)
    b = Unsqueeze(running, middle)
    same = Equal(a, b)
    both = And(before, same)
    seen = Unsqueeze(both, middle)
    mask = Where(seen, open, closed)
"""
NUMBERS = """
    int64 zero = {0}, int64 one = {1}, int64 length = {4}, int64[1] last = {-1},
    int64[1] middle = {1}, float open = {0.0}, float closed = {-1e30}
"""
ATTENTION = """
    masked = Add(x, mask)
    p = Softmax<axis=-1>(masked)
    y = MatMul(p, v)
"""
INPUTS = "float[2,3,4,4] x, float[2,3,4,5] v"


def model_of(
    body: str, more: str = "", inputs: str = INPUTS, outputs: str = "float[2,3,4,5] y"
) -> onnx.ModelProto:
    numbers = NUMBERS + (f", {more}" if more else "")
    return parser.parse_model(f"{HEAD} g ({inputs}) => ({outputs}) <{numbers}> {{{body}}}")


def starts_of(*documents: tuple[int, ...]) -> str:
    numbers = ",".join(str(n) for row in documents for n in row)
    return f"int64[{len(documents)},4] starts = {{{numbers}}}"


ONE_DOCUMENT = starts_of((0, 0, 0, 0), (0, 0, 0, 0))


def rewritten(proto: onnx.ModelProto) -> tuple[int, onnx.ModelProto]:
    onnx.checker.check_model(proto)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    changed = fold_constant_masks(model, OpBuilder(model.graph, "t/", target="cuda"))
    simplify(model)
    made = ir.to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    return changed, made


def results(proto: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {}
    for x in sorted(session.get_inputs(), key=lambda x: x.name):
        drawn = rng.standard_normal(x.shape)
        feeds[x.name] = drawn > 0 if "bool" in x.type else drawn.astype(np.float32)
    return [np.asarray(y) for y in session.run(None, feeds)]


def same_results(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    for a, b in zip(results(before), results(after), strict=True):
        np.testing.assert_array_equal(a, b)


def kinds(proto: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in proto.graph.node)


def constants(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: ir.from_proto(t).numpy() for t in proto.graph.initializer}


def test_one_constant_for_all_rows() -> None:
    again = "mask2 = Where(seen, open2, closed2) x2 = Add(y, mask2) z = Softmax<axis=-1>(x2)"
    before = model_of(
        CAUSAL + ATTENTION + again,
        ONE_DOCUMENT + ", float open2 = {0.0}, float closed2 = {-1e30}",
        "float[2,3,4,4] x, float[2,3,4,4] v",
        "float[2,3,4,4] z",
    )
    changed, after = rewritten(before)
    assert changed == 2
    assert kinds(after) == {"Add": 2, "Softmax": 2, "MatMul": 1}
    (mask,) = constants(after).values()  # both layers read it
    assert mask.shape == (1, 1, 4, 4)
    assert (mask == np.triu(np.full((4, 4), np.float32(-1e30)), 1)).all()
    same_results(before, after)


def test_masks_that_differ_between_rows() -> None:
    before = model_of(CAUSAL + ATTENTION, starts_of((0, 0, 1, 0), (0, 0, 0, 0)))
    _, after = rewritten(before)
    (mask,) = constants(after).values()
    assert mask.shape == (2, 1, 4, 4)
    same_results(before, after)


def test_a_mask_of_zeros_vanishes() -> None:
    before = model_of(
        CAUSAL.replace("LessOrEqual(i, rows)", "Equal(i, i)") + ATTENTION, ONE_DOCUMENT
    )
    _, after = rewritten(before)
    assert kinds(after) == {"Softmax": 1, "MatMul": 1}
    same_results(before, after)


@pytest.mark.parametrize("closed_row", [False, True])
def test_guards_stay_for_fully_masked_rows(closed_row: bool) -> None:
    body = CAUSAL.replace("LessOrEqual", "Less") if closed_row else CAUSAL
    guard = """
        top = ReduceMax(mask, last)
        is_open = Greater(top, low)
        guarded = Where(is_open, y, open)
        z = Neg(guarded)
    """
    before = model_of(
        body + ATTENTION + guard,
        ONE_DOCUMENT + ", float low = {-1e29}",
        outputs="float[2,3,4,5] z",
    )
    _, after = rewritten(before)
    assert kinds(after)["Where"] == closed_row
    assert kinds(after)["ReduceMax"] == 0
    same_results(before, after)


def test_a_mask_that_gives_the_batch_its_size_keeps_it() -> None:
    before = model_of(CAUSAL + ATTENTION, ONE_DOCUMENT, "float[1,3,4,4] x, float[1,3,4,5] v")
    _, after = rewritten(before)
    (mask,) = constants(after).values()
    assert mask.shape == (2, 1, 4, 4)
    same_results(before, after)


@pytest.mark.parametrize(
    ("inputs", "more"),
    [(f"{INPUTS}, float[2,1,4,4] bias", ""), (INPUTS, "float[2,1,1,4] bias = {1,2,3,4,5,6,7,8}")],
    ids=["an input", "a frozen table"],
)
def test_other_values_stay(inputs: str, more: str) -> None:
    body = "twice = Add(bias, bias) mask = Abs(twice)" + ATTENTION
    before = model_of(body, more, inputs)
    changed, after = rewritten(before)
    assert changed == 0
    assert kinds(after)["Abs"] == 1
    same_results(before, after)


def test_a_mask_without_effect_vanishes() -> None:
    """Of ones, as exporters put it in where the caller left it out."""
    more = "float[2,1,1,4] ones = {1,1,1,1,1,1,1,1}"
    body = "pair = Mul(ones, ones) there = Cast<to=9>(pair) mask = Where(there, open, closed)"
    before = model_of(body + ATTENTION, more)
    _, after = rewritten(before)
    assert kinds(after) == {"Softmax": 1, "MatMul": 1}
    same_results(before, after)


def test_a_frozen_bias_of_zeros_stays() -> None:
    before = model_of(ATTENTION, "float[2,1,1,4] mask = {0,0,0,0,0,0,0,0}")
    changed, after = rewritten(before)
    assert changed == 0
    same_results(before, after)


def test_a_stored_mask_loses_its_copies() -> None:
    row = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    before = model_of(ATTENTION, "float[2,1,4,4] mask = {" + ",".join(["0"] * 32) + "}")
    for t in before.graph.initializer:
        if t.name == "mask":
            t.CopyFrom(ir.to_proto(ir.tensor(np.stack([row[None], row[None]]), name="mask")))
    _, after = rewritten(before)
    (mask,) = constants(after).values()
    np.testing.assert_array_equal(mask, row[None, None])
    same_results(before, after)


@pytest.mark.parametrize("name", ["CONSTANT_MASK_ELEMENTS", "COMPUTED_MASK_ELEMENTS"])
def test_large_masks_stay_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, name, 15)
    before = model_of(CAUSAL + ATTENTION, ONE_DOCUMENT)
    changed, after = rewritten(before)
    assert changed == 0
    assert kinds(after)["Where"] == 1


def test_a_mask_in_16_bits_equals_its_cast() -> None:
    """The standard's reference reads no bfloat16; numbers are rounded as a Cast rounds them."""
    proto = model_of(
        CAUSAL + "short = Cast<to=16>(mask) y = Cast<to=1>(short)",
        ONE_DOCUMENT,
        outputs="float[2,1,4,4] y",
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    closed = FoldableValues(model.graph, 21, 1000)
    short = next(y for n in model.graph for y in n.outputs if y.name == "short")
    array = closed.array(short)
    assert array is not None
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), results(proto)[0])


class Masked(nn.Module):
    """Attention with a causal mask for each row of the batch, and the exporters' guard."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(5, 5)) if learned else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.arange(5)[None, :] <= torch.arange(5)[:, None]
        seen = seen.expand(x.shape[0], 5, 5)
        mask = torch.where(seen, 0.0, float("-inf")) if self.bias is None else self.bias
        p = torch.softmax(q @ k.transpose(-1, -2) * 0.35 + mask, -1)
        return torch.tanh(torch.where(torch.isnan(p), 0.0, p) @ v)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dims", [{}, {"batch": 3}], ids=["any batch", "fixed"])
def test_training_follows_torch(learned: bool, dims: dict[str, int]) -> None:
    module, x = Masked(learned), torch.randn(3, 5, 8)
    model = from_torch(module, (x,))
    made = onnxtrain.build(model, loss="mse", optimizer=optim.SGD(lr=0.5), target="cuda", dims=dims)
    counts = kinds(made.models["step"])
    assert counts["IsNaN"] == 0
    if dims and not learned:
        assert counts["Where"] == counts["Greater"] == 0
    trainer = onnxtrain.Trainer(made)
    assert len(trainer.parameters) == 3 if learned else 2, "a bias of scores is trained, too"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for seed in range(4):
        torch.manual_seed(seed)
        x, target = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
        loss = nn.functional.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(x.numpy(), target.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_a_tensor_without_elements_stays() -> None:
    assert not is_mask(np.zeros((0, 3), np.float32))
    assert is_mask(np.array([0.0, -1e30], np.float32))
