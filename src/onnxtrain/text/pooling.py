"""Encoders that give a vector per token, with a vector or scores per text behind them."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.load_normalized import own_domains
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import Source, load
from onnxtrain.text.names import MASK

EMBEDDING = "sentence_embedding"
LOGITS = "logits"
_WAYS = ("mean", "first")
_SMALL = 1e-9


def pooled(model: Source, *, how: str = "mean") -> ir.Model:
    """Return a copy of an encoder whose only output is ``sentence_embedding``, ``[batch, D]``.

    Args:
        model: gives a vector per token, ``[batch, sequence, D]``, or a vector per text already,
            called ``sentence_embedding`` or the only output of two axes.
        how: ``"mean"`` of the tokens that the mask counts, or the ``"first"`` token.

    Raises:
        PrepareError: no output of the model has such vectors.
    """
    if how not in _WAYS:
        raise PrepareError(f"no such pooling: {how!r}\nhint: one of {', '.join(_WAYS)}")
    work = load(model, allow_domains=own_domains())
    graph = work.graph
    flat = [y for y in graph.outputs if len(S.dims_of(y) or ()) == 2 and S.is_float(y)]
    known = next((y for y in flat if y.name == EMBEDDING), None)
    hidden = next(
        (y for y in graph.outputs if len(S.dims_of(y) or ()) == 3 and S.is_float(y)), None
    )
    if known is None and hidden is None and len(flat) == 1:
        known = flat[0]
    if known is None and hidden is None:
        listing = ", ".join(S.describe_value(y) for y in graph.outputs)
        raise PrepareError(f"no output has vectors of tokens or texts: {listing}")
    if known is None:
        assert hidden is not None
        known = _pool(OpBuilder(graph, "pool/"), hidden, how)
        known.name = EMBEDDING
    graph.outputs[:] = [known]
    return work


def _pool(op: OpBuilder, hidden: ir.Value, how: str) -> ir.Value:
    if how == "first":
        return op.Squeeze(op.Slice(hidden, [0], [1], [1]), [1])
    mask = next((x for x in op.graph.inputs if x.name == MASK), None)
    if mask is None:
        return op.ReduceMean(hidden, [1], keepdims=0)
    counts = op.Unsqueeze(op.cast(mask, hidden.dtype), [2])
    total = op.ReduceSum(op.Mul(hidden, counts), [1], keepdims=0)
    return op.Div(total, op.Add(op.ReduceSum(counts, [1], keepdims=0), _SMALL))


def with_classifier(model: Source, classes: int, *, how: str = "mean", seed: int = 0) -> ir.Model:
    """Return a copy of an encoder with a new layer that scores texts, ``logits [batch, classes]``.

    The layer's weights are ``classifier.weight`` and ``classifier.bias``, drawn as torch does.
    """
    work = pooled(model, how=how)
    graph = work.graph
    (embedding,) = graph.outputs
    width = (S.dims_of(embedding) or (None,))[-1]
    if not isinstance(width, int):
        raise PrepareError(f"the size of {S.describe_value(embedding)} is not known")
    rng = np.random.default_rng(seed)
    bound = 1.0 / math.sqrt(width)
    op = OpBuilder(graph, "classifier/")
    weight = _weight(op, "classifier.weight", rng.uniform(-bound, bound, (width, classes)))
    bias = _weight(op, "classifier.bias", rng.uniform(-bound, bound, classes))
    scores = op.Gemm(op.cast(embedding, ir.DataType.FLOAT), weight, bias)
    scores.name = LOGITS
    graph.outputs[:] = [scores]
    return work


def _weight(op: OpBuilder, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array.astype(np.float32), name=op.names.fresh(name))
    value = ir.Value(
        name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    op.graph.register_initializer(value)
    return value


__all__ = ["EMBEDDING", "pooled", "with_classifier"]
