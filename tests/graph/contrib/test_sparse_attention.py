"""SparseAttention agrees with onnxruntime's kernel, for prompts and after a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.text.model_folder import without_cache
from tests.graph.contrib.fused_case import BATCH, Case, normal

N, K, H, BLOCK, LENGTH, ROOM = 4, 2, 16, 16, 40, 64
LAYOUTS = np.array(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]],
    ]
)
"""Which block of keys (columns) a block of queries (rows) sees, for even and odd heads."""
Q, KV = normal(BATCH, LENGTH, N * H), normal(BATCH, LENGTH, K * H)
V = normal(BATCH, LENGTH, K * H)[::-1].copy()
PACKED = normal(BATCH, LENGTH, (N + 2 * K) * H)
OLD = normal(BATCH, K, ROOM, H), normal(BATCH, K, ROOM, H)[..., ::-1].copy()
ANGLES = np.outer(np.arange(ROOM), 10000.0 ** (-np.arange(H // 2) / (H // 2)))
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
FULL = np.full(BATCH, LENGTH, np.int32)


def tables(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row starts and column indices of attended blocks, padded with -1."""
    starts = np.concatenate([np.zeros((len(layouts), 1), int), layouts.sum(axis=2).cumsum(1)], 1)
    columns = np.full((len(layouts), starts.max()), -1, np.int32)
    for row, layout in zip(columns, layouts, strict=True):
        places = np.nonzero(layout)[1]
        row[: len(places)] = places
    return starts.astype(np.int32), columns


def kernel(*inputs: np.ndarray | None, **attributes: object) -> np.ndarray:
    """Run onnxruntime's kernel, which writes new tokens into the buffer of the cache."""
    case = Case("SparseAttention", list(inputs), attributes, ("y", "k", "v"), constants=(5, 6))
    session = onnxruntime.InferenceSession(
        case.model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = {
        n: onnxruntime.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in case.feeds().items()
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    for name, cache in (("k", "x3"), ("v", "x4")):
        binding.bind_ortvalue_output(name, values[cache])
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


def each_alone(*inputs: np.ndarray | None, **attributes: object) -> np.ndarray:
    """Run the kernel for each sequence separately; return zeros after its end.

    Of several sequences with different lengths the kernel reads the scores at the wrong place.
    """
    x, lens, total = inputs[0], inputs[8], inputs[7]
    assert x is not None
    assert lens is not None
    assert total is not None
    y = np.zeros((BATCH, x.shape[1], N * H), np.float32)
    for i, length in enumerate(lens):
        end = min(x.shape[1], length) if total[0] == x.shape[1] else x.shape[1]
        own = [a if a is None else a[i : i + 1, :end] for a in inputs[:3]]
        own += [a if a is None else a[i : i + 1] for a in inputs[3:5]]
        own += [*inputs[5:7], lens[i : i + 1], lens[i : i + 1], *inputs[9:]]
        y[i, :end] = kernel(*own, **attributes)[0]
    return y


def sparse(
    *projected: np.ndarray,
    layouts=LAYOUTS,
    lens=FULL,
    total=LENGTH,
    cos=False,
    rows=None,
    **attributes,
) -> Case:
    inputs = [*projected, *[None] * (3 - len(projected)), *OLD, *tables(layouts)]
    inputs += [np.array([total], np.int32), lens, *((COS, SIN) if cos else ())]
    attributes |= {"num_heads": N, "kv_num_heads": K, "sparse_block_size": BLOCK}
    attributes |= {"do_rotary": 1} if cos else {}
    return Case(
        "SparseAttention",
        inputs,
        attributes,
        constants=(5, 6),
        rows=rows,
        fixed=(9, 10),
        reference=kernel if (lens == total).all() else each_alone,
    )


PADDED = np.array([LENGTH, LENGTH - 7], np.int32)
CASES = {
    "separate": sparse(Q, KV, V),
    "packed": sparse(PACKED),
    "rotary": sparse(PACKED, cos=True),
    "interleaved": sparse(PACKED, cos=True, rotary_interleaved=1),
    "scale": sparse(Q, KV, V, scale=0.3),
    "one layout": sparse(PACKED, layouts=LAYOUTS[:1]),
    "everything is seen": sparse(PACKED, layouts=np.tril(np.ones((1, 4, 4), int))),
    "padding": sparse(PACKED, lens=PADDED, rows=np.arange(LENGTH) < PADDED[:, None]),
    "a token behind a cache": sparse(
        PACKED[:, :1], cos=True, lens=np.array([37, 50], np.int32), total=50
    ),
    "tokens behind a cache": sparse(
        PACKED[:, :20], cos=True, lens=np.array([37, 50], np.int32), total=50
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(name: str) -> None:
    CASES[name].check_forward()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name: str) -> None:
    CASES[name].check_gradient()


def test_layouts_mask_some_blocks() -> None:
    """Otherwise the cases above would pass without the tables."""
    (dense,) = [kernel(*CASES["everything is seen"].inputs, **CASES["packed"].attributes)]
    assert np.abs(dense - kernel(*CASES["packed"].inputs, **CASES["packed"].attributes)).max() > 0.1


def test_without_a_cache_it_computes_whole_sequences() -> None:
    case = CASES["rotary"]
    model = ir.from_proto(case.model())
    names = {"x0": "input_ids", "x3": "past_key_values.0.key", "x4": "past_key_values.0.value"}
    for value in model.graph.inputs:
        value.name = names.get(value.name or "", value.name)
    whole = without_cache(model)
    assert {x.name for x in whole.graph.inputs}.isdisjoint(set(names.values()) - {"input_ids"})
    made = onnxtrain.vjp(whole, wrt=["input_ids"])
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {**case.feeds(), "input_ids": case.feeds()["x0"]}
    feeds["y_grad"] = np.ones((BATCH, LENGTH, N * H), np.float32)
    known = {x.name for x in session.get_inputs()}
    (y,) = session.run(["y"], {n: a for n, a in feeds.items() if n in known})
    want = kernel(*case.inputs, **case.attributes)
    np.testing.assert_allclose(np.asarray(y), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", [(1, 1), (0, 1)])
def test_layouts_without_the_diagonal_or_with_future_blocks_raise(place) -> None:
    layouts = LAYOUTS[:1].copy()
    layouts[0][place] ^= 1
    with pytest.raises(PrepareError, match="does not attend to itself, or attends to later blocks"):
        onnxtrain.vjp(sparse(PACKED, layouts=layouts).model(), "x0")


def test_computed_tables_raise() -> None:
    case = sparse(PACKED)
    open_tables = Case(case.op, case.inputs, case.attributes)
    with pytest.raises(PrepareError, match="block_col_indices must be constant"):
        onnxtrain.vjp(open_tables.model(), "x0")


def test_rotary_tables_are_not_trained() -> None:
    model = dataclasses.replace(CASES["rotary"], constants=(5, 6, 9, 10)).model()
    assert not onnxtrain.parameters(model)
    report = str(onnxtrain.explain(model))
    assert "x9: a table of sines and cosines" in report
    assert "x10: a table of sines and cosines" in report
