"""Cases for losses with class labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, at, const, f, fixed, ints, positive

SCE, NLL = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
LABELS = ints([2, 0, 1, 2])
IMAGE = ints([[[0, 2], [1, 1]], [[2, 2], [0, 1]]])


def _loss(logp, labels, weights=None, ignore=None, reduction="mean") -> torch.Tensor:
    """The definition, differentiable with respect to the weights, too."""
    labels = labels.long()
    ignored = torch.zeros_like(labels, dtype=torch.bool) if ignore is None else labels == ignore
    index = labels.masked_fill(ignored, 0)
    w = torch.ones(logp.shape[1], dtype=logp.dtype) if weights is None else weights
    w = w[index] * ~ignored
    each = -logp.gather(1, index.unsqueeze(1)).squeeze(1) * w
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / w.sum()


def _cross_entropy(**options) -> Callable:
    def oracle(x, labels, weights=None):
        if weights is not None and weights.requires_grad:
            return _loss(x.log_softmax(1), labels, weights, **options)
        named = dict(options)
        ignore = named.pop("ignore", None)
        if ignore is not None:
            named["ignore_index"] = ignore
        return F.cross_entropy(x, labels.long(), weights, **named)

    return oracle


def _nll(**options) -> Callable:
    return lambda x, labels, weights=None: _loss(x, labels, weights, **options)


def _with_log_prob(oracle: Callable) -> Callable:
    return lambda x, *rest: (oracle(x, *rest), x.log_softmax(1))


def _family(op: str, oracle: Callable) -> list[OpCase]:
    return [
        OpCase(op, (f(4, 3), LABELS), torch=oracle()),
        OpCase(
            op, (f(4, 3), LABELS), {"reduction": "sum"}, torch=oracle(reduction="sum"), id="sum"
        ),
        OpCase(
            op, (f(4, 3), LABELS), {"reduction": "none"}, torch=oracle(reduction="none"), id="none"
        ),
        OpCase(op, (f(4, 3), LABELS, fixed(positive(3))), torch=oracle(), id="weights-fixed"),
        OpCase(op, (f(4, 3), LABELS, positive(3)), torch=oracle(), id="weights"),
        OpCase(
            op,
            (f(4, 3), LABELS, positive(3)),
            {"reduction": "sum"},
            torch=oracle(reduction="sum"),
            id="weights-sum",
        ),
        OpCase(
            op,
            (f(4, 3), ints([2, -1, 1, 2])),
            {"ignore_index": -1},
            torch=oracle(ignore=-1),
            id="ignore",
            forward="torch",  # the reference counts negative ignored labels in a mean
        ),
        OpCase(
            op,
            (f(4, 3), ints([2, 1, 1, 0], np.int32), positive(3)),
            {"ignore_index": 1},
            torch=oracle(ignore=1),
            id="ignore-weights-int32",
        ),
        OpCase(op, (f(2, 3, 2, 2), IMAGE), torch=oracle(), id="image"),
        OpCase(
            op,
            (f(2, 3, 2, 2), IMAGE, positive(3)),
            {"reduction": "none", "ignore_index": 2},
            torch=oracle(reduction="none", ignore=2),
            id="image-ignore-weights",
        ),
        OpCase(
            op,
            (f(2, 3, 2), ints([[0, 2], [1, 1]]), const([0.5, 1.0, 2.0])),
            torch=oracle(),
            id="sequence-constant-weights",
        ),
    ]


CASES = [
    *_family(SCE, _cross_entropy),
    *_family(NLL, _nll),
    OpCase(
        SCE,
        (f(4, 3), LABELS),
        torch=_with_log_prob(_cross_entropy()),
        outputs=2,
        id="log-prob",
    ),
    OpCase(
        SCE,
        (f(2, 3, 2, 2), IMAGE, positive(3)),
        {"reduction": "none", "ignore_index": 0},
        torch=_with_log_prob(_cross_entropy(reduction="none", ignore=0)),
        outputs=2,
        id="log-prob-image",
    ),
    OpCase(
        SCE,
        (at([[1000.0, 0.0, -1000.0], [-50.0, 60.0, 60.0]]), ints([1, 0])),
        torch=_cross_entropy(),
        id="far",
        forward="torch",
    ),
]
