"""WordConvEmbedding: word embeddings from characters."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime

import onnxtrain
from tests.graph.contrib.fused_case import Case, load_normalized_proto, normal

WORDS = Case(
    "WordConvEmbedding",
    [
        np.array([[3, 1, 2, 4, 0, 0], [5, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 1]], np.int32),
        *(normal(4, 1, 3, 5), normal(4), normal(6, 5)),
    ],
    symbolic=False,
    precision=np.float32,
)


def test_equals_the_kernel() -> None:
    WORDS.check_forward()


def test_gradient_equals_finite_differences() -> None:
    WORDS.check_gradient()


def test_empty_word_is_zero() -> None:
    """The kernel leaves uninitialized memory for empty words; other words must agree."""
    words = np.array([[3, 1, 2, 0], [0, 0, 0, 0], [0, 2, 2, 1]], np.int32)
    arrays = [words, normal(4, 1, 3, 5), normal(4), normal(6, 5)]
    case = Case("WordConvEmbedding", arrays, symbolic=False)
    session = onnxruntime.InferenceSession(load_normalized_proto(case.model()).SerializeToString())
    (y,) = map(np.asarray, session.run(None, case.feeds()))
    assert np.abs(y[0]).min() > 0
    assert not y[1:].any()


def test_weights_of_words_are_trained() -> None:
    case = dataclasses.replace(WORDS, constants=(1, 2, 3))
    assert set(onnxtrain.parameters(case.model())) == {"x1", "x2", "x3"}
