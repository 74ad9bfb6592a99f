"""Keys and values filled up to whole words: the same values, gradients and losses."""

from __future__ import annotations

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
from onnxtrain.graph.memory import scores
from onnxtrain.targets import Target, find
from onnxtrain.torch import from_torch

F = nn.functional
CUDA = find("cuda")
PLAIN = CUDA.without("aligned-keys")
HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
ATTENTION = """
    scale = Constant<value_float=0.5>()
    kt = Transpose<perm=[0,1,3,2]>(k)
    raw = MatMul(q, kt)
    x = Mul(raw, scale)
    {mask}
    p = Softmax<axis=-1>({scores})
    y = MatMul(p, v)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ALIGNED_KEYS", 3)
    monkeypatch.setattr(thresholds, "ALIGNED_SCORES", 8)
    monkeypatch.setattr(thresholds, "CLOSED_WITHIN", 1 << 10)


@pytest.fixture(params=["pass", "product"])
def closed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "product":
        monkeypatch.setattr(thresholds, "CLOSED_WITHIN", 0)
    return request.param


def attention(
    queries: int, keys: int, mask: str = "", inputs: str = "", numbers: str = ""
) -> onnx.ModelProto:
    body = ATTENTION.format(mask=mask, scores="masked" if mask else "x")
    return parser.parse_model(
        f"{HEAD} g (float[2,3,{queries},4] q, float[2,3,{keys},4] k, float[2,3,{keys},4] v{inputs})"
        f" => (float[2,3,{queries},4] y) <float one = {{1}}{numbers}> {{{body}}}"
    )


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [y.name for y in session.get_outputs()]
    known = {i.name for i in session.get_inputs()}
    results = session.run(names, {n: x for n, x in feeds.items() if n in known})
    return {n: np.asarray(y) for n, y in zip(names, results, strict=True)}


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = rng.random(shape) < 0.7
            feeds[value.name][..., 0] = True
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def last_size(x: ir.Value | None) -> int:
    """Return the size of the last axis, or 0 if it is not known or there is none."""
    size = x.shape[-1] if x is not None and x.shape is not None and len(x.shape) else 0
    return size if isinstance(size, int) else 0


def row_lengths(model: onnx.ModelProto) -> set[int]:
    """Return how long the rows of scores are, wherever a softmax makes some."""
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    rows = [n.outputs[0] for n in graph if n.op_type == "Softmax"]
    return {d for d in (last_size(x) for x in rows) if d}


def gradients(model: onnx.ModelProto, target: str | Target) -> onnx.ModelProto:
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    return onnxtrain.vjp(
        model, [n for n, kind in kinds.items() if kind == onnx.TensorProto.FLOAT], target=target
    )


def same_gradients(
    model: onnx.ModelProto, length: int, feeds: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """Check all gradients with and without the pass, and that rows are as long as they should."""
    onnx.checker.check_model(model, full_check=True)
    whole, plain = (gradients(model, t) for t in (CUDA, PLAIN))
    onnx.checker.check_model(whole, full_check=True)
    assert row_lengths(whole) == {length}
    feeds = feeds_of(plain) | (feeds or {})
    expected = run(plain, feeds)
    actual = run(whole, feeds)
    assert list(actual) == list(expected)
    assert len(expected) > 3
    for name, value in expected.items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    return whole


SIZES = [(5, 5, 8), (13, 13, 16), (7, 197, 200), (197, 9, 12)]


@pytest.mark.parametrize(("queries", "keys", "length"), SIZES)
def test_attention_without_a_mask(queries: int, keys: int, length: int, closed_by: str) -> None:
    whole = same_gradients(attention(queries, keys), length)
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    assert len(sums) == (closed_by == "pass")


@pytest.mark.parametrize(
    ("scale", "closed_by_features"), [("0.5", True), ("-0.5", False), (None, False)]
)
@pytest.mark.parametrize("place", ["q", "k", "scores"])
def test_features_close_keys_where_nothing_turns_their_sign(
    scale: str | None, closed_by_features: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "CLOSED_WITHIN", 0)
    more = {
        "q": "a = Mul(q, factor) raw = MatMul(a, kt)",
        "k": "a = Mul(kt, factor) raw = MatMul(q, a)",
        "scores": "a = MatMul(q, kt) raw = Mul(a, factor)",
    }
    factor = f"factor = Constant<value_float={scale}>()" if scale else ""
    model = attention(5, 5, inputs="" if scale else ", float factor")
    source = onnx.printer.to_text(model).replace("raw = MatMul (q, kt)", factor + more[place])
    whole = same_gradients(parser.parse_model(source), 8, {"factor": np.array(-2.0, np.float32)})
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    # In front of the product, features are put in behind a factor that may be below zero.
    assert len(sums) == (not closed_by_features and place == "scores")


def test_forward_derivatives(closed_by: str) -> None:
    model = attention(5, 13)
    whole, plain = (onnxtrain.jvp(model, ["q", "k", "v"], target=t) for t in (CUDA, PLAIN))
    assert row_lengths(whole) == {16}, closed_by
    feeds = feeds_of(plain)
    expected, actual = run(plain, feeds), run(whole, feeds)
    assert len(expected) == 2
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("keys", [4, 8, 12])
def test_whole_words_stay(keys: int) -> None:
    same_gradients(attention(5, keys), keys)


def causal(size: int, closed: float) -> str:
    rows = np.where(np.tri(size, dtype=bool), 0.0, closed)
    return ",".join(f"{n:g}" for n in rows.ravel())


@pytest.mark.parametrize("closed", [-1e30, -3.4e38, -1e4])
def test_a_causal_mask(closed: float) -> None:
    numbers = f", float[1,1,5,5] mask = {{{causal(5, closed)}}}"
    whole = same_gradients(attention(5, 5, "masked = Add(x, mask)", numbers=numbers), 8)
    sums = [n for n in whole.graph.node if n.op_type == "Add"]
    assert len(sums) == 1, "the mask closes the new keys as well"


def test_rows_that_are_closed_as_a_whole_stay_as_they_are() -> None:
    # All scores of the row are the same large number: each key has the same probability.
    rows = np.where(np.tri(5, k=-1, dtype=bool), 0.0, -3.4028234e38).ravel()
    numbers = f", float[1,1,5,5] mask = {{{','.join(f'{n:.9g}' for n in rows)}}}"
    same_gradients(attention(5, 5, "masked = Add(x, mask)", numbers=numbers), 8)


@pytest.mark.parametrize("shape", ["2,1,5,5", "2,1,1,5", "5", "1,3,5,5", "2,1,5,1"])
@pytest.mark.parametrize("order", ["x, mask", "mask, x"])
def test_a_mask_that_is_an_input(shape: str, order: str) -> None:
    model = attention(5, 5, f"masked = Add({order})", f", float[{shape}] mask")
    same_gradients(model, 8)


@pytest.mark.parametrize("hidden", ["x, low", "low, x"])
@pytest.mark.parametrize("low", ["-1e4", "-3.4e38", "input"])
def test_a_mask_that_chooses(hidden: str, low: str) -> None:
    inputs, numbers = ", bool[2,1,5,5] seen", f", float low = {{{low}}}"
    if low == "input":
        inputs, numbers = f"{inputs}, float low", ""
    model = attention(5, 5, f"masked = Where(seen, {hidden})", inputs, numbers)
    same_gradients(model, 8)


def test_a_mask_in_front_of_a_factor() -> None:
    mask = "added = Add(x, mask) masked = Mul(added, negative)"
    model = attention(5, 5, mask, ", float[2,1,5,5] mask", ", float negative = {-0.5}")
    same_gradients(model, 8)


def test_two_masks_and_another_shape_between_them() -> None:
    mask = """
        biased = Add(x, bias)
        apart = Reshape(biased, windows)
        hidden = Add(apart, mask)
        masked = Reshape(hidden, together)
    """
    inputs = ", float[1,3,5,5] bias, float[1,2,1,5,5] mask"
    numbers = ", int64[5] windows = {1,2,3,5,5}, int64[4] together = {2,3,5,5}"
    same_gradients(attention(5, 5, mask, inputs, numbers), 8)


def test_scores_that_someone_else_reads_stay() -> None:
    model = attention(
        5, 5, "twice = Add(x, x) masked = Mul(twice, half)", "", ", float half = {0.5}"
    )
    same_gradients(model, 5)


def test_sizes_that_are_not_known_stay() -> None:
    model = attention(5, 5)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    made = gradients(model, CUDA)
    assert row_lengths(made) <= {5}
    assert "Concat" not in {n.op_type for n in made.graph.node}


def test_short_sequences_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ALIGNED_KEYS", 6)
    same_gradients(attention(5, 5), 5)
    monkeypatch.setattr(thresholds, "ALIGNED_KEYS", 3)
    monkeypatch.setattr(thresholds, "ALIGNED_SCORES", 2 * 3 * 5 * 5 + 1)
    same_gradients(attention(5, 5), 5)


def test_other_targets_have_no_use_for_it() -> None:
    for target in ("cpu", "wasm", "webgpu", "portable"):
        assert not find(target).prefers("aligned-keys")
        assert row_lengths(gradients(attention(5, 5), target)) <= {5}


class Layer(nn.Module):
    """Attention of several heads, which may share keys and values, and a linear layer."""

    def __init__(self, shared: int, causal: bool) -> None:
        super().__init__()
        self.shared, self.causal, self.norm = shared, causal, nn.LayerNorm(16)
        self.q, self.kv, self.out = (
            nn.Linear(16, 16),
            nn.Linear(16, 32 // shared),
            nn.Linear(16, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, kv = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q(h), self.kv(h)))
        k, v = (part.repeat_interleave(self.shared, 1) for part in kv.chunk(2, 1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """torch's own attention, whose projection is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attend(h, h, h, need_weights=False)[0]


class Pictures(nn.Module):
    """A small vision transformer: 12 patches and a token for the class make 13 positions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.patches, self.token = nn.Linear(6, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 13, 16))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patches(x)], 1)
        return self.head(self.layers(h + self.places)[:, 0])


KINDS = ["packed", "open", "causal", "grouped"]


def pictures(kind: str) -> Pictures:
    torch.manual_seed(0)
    if kind == "packed":
        return Pictures(Packed(), Packed())
    return Pictures(*(Layer(2 if kind == "grouped" else 1, kind == "causal") for _ in range(2)))


def built(
    module: nn.Module, precision: str = "float32", recompute: str = ""
) -> onnxtrain.Artifacts:
    model = from_torch(module, (torch.randn(2, 12, 6),))
    return onnxtrain.build(
        model,
        loss="cross_entropy",
        optimizer=optim.SGD(lr=0.01),
        target="cuda",
        precision=precision,
        dims={"batch": 2},
        recompute=recompute or (),
    )


def unaligned(model: onnx.ModelProto, word: int) -> list[list[str]]:
    """Return the products of attention with rows that are no whole words, as they lie in memory."""
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    odd = []
    for node in graph:
        if node.op_type != "MatMul":
            continue
        sides = [x for x in node.inputs if x is not None]
        for i, x in enumerate(sides):
            turn = x.producer()
            if turn is not None and turn.op_type == "Transpose" and turn.inputs[0] is not None:
                perm = turn.attributes["perm"].as_ints()
                if perm[-2:] == (len(perm) - 1, len(perm) - 2):  # the product's kernel does that
                    sides[i] = turn.inputs[0]
        values = [*sides, node.outputs[0]]
        if all(x.shape is not None and len(x.shape) == 4 for x in values):
            odd += [[str(x.shape) for x in values]] * any(last_size(x) % word for x in values)
    return odd


@pytest.mark.parametrize(("kind", "recompute"), [*((k, "") for k in KINDS), ("packed", "auto")])
def test_losses_follow_torch(kind: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if recompute or kind == "open":
        monkeypatch.setattr(thresholds, "CLOSED_WITHIN", 0)
    module = pictures(kind)
    artifacts = built(module, recompute=recompute)
    assert row_lengths(artifacts.models["step"]) == {16}
    assert unaligned(artifacts.models["step"], 4) == []
    trainer = onnxtrain.Trainer(artifacts, threads=1)
    update = torch.optim.SGD(module.parameters(), lr=0.01)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        x, labels = torch.randn(2, 12, 6, generator=g), torch.randint(0, 3, (2,), generator=g)
        loss = F.cross_entropy(module(x), labels)
        update.zero_grad()
        loss.backward()
        update.step()
        actual = trainer.step(x.numpy(), labels.numpy()).loss
        assert actual == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(
            trainer.parameters[name], p.detach(), rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("kind", ["packed", "grouped"])
def test_models_for_evaluation_and_export_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(pictures(kind))
    monkeypatch.setattr(thresholds, "ALIGNED_KEYS", 14)
    plain = built(pictures(kind))
    assert made.models["step"] != plain.models["step"]
    assert unaligned(plain.models["step"], 4) != []
    assert made.manifest.parameters == plain.manifest.parameters
    for role in ("eval", "infer"):
        assert made.models[role] == plain.models[role]


@pytest.mark.parametrize("kind", ["packed", "causal"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_sixteen_bits(kind: str, precision: str) -> None:
    artifacts = built(pictures(kind), precision)
    onnx.checker.check_model(artifacts.models["step"], full_check=True)
    assert row_lengths(artifacts.models["step"]) == {16}
    if precision == "bf16-mixed":  # no kernel on the CPU
        return
    x, labels = np.random.default_rng(0).normal(size=(2, 12, 6)), np.array([0, 2])
    losses = []
    for made in (artifacts, built(pictures(kind))):
        trainer = onnxtrain.Trainer(made, threads=1)
        losses.append([trainer.step(x.astype(np.float32), labels).loss for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=5e-3)


@pytest.mark.parametrize("keys", [13, 16])
def test_the_operator_for_attention_reads_the_keys_that_count(
    keys: int, closed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "OPERATOR_TYPES", (ir.DataType.FLOAT, ir.DataType.BFLOAT16))
    monkeypatch.setattr(thresholds, "MADE_AGAIN_BYTES", 1)
    source = onnx.printer.to_text(attention(13, keys)).replace(",4]", ",8]").replace(", 4]", ", 8]")
    model = onnx.parser.parse_model(
        source.replace("y = MatMul", "o = MatMul")
        .replace("(p, v)", "(p, v) y = Neg (o)")
        .replace("raw = MatMul (q, kt)", "kk = Mul (kt, scale) raw = MatMul (q, kk)")
    )
    whole = same_gradients(model, 16)
    assert sum(n.op_type == "Attention" for n in whole.graph.node) == 1
