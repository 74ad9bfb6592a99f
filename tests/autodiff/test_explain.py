"""`explain` counts the elements of trainable parameters."""

from __future__ import annotations

import onnx

import onnxtrain
from tests.artifacts.models import classifier
from tests.wild import graphs as g


def test_explain_counts_the_elements_of_trainable_parameters() -> None:
    report = onnxtrain.explain(classifier())
    assert report.elements == 6 * 8 + 8 + 8 * 3 + 3
    assert "parameters: 4 (83 elements)" in str(report)
    assert onnxtrain.explain(classifier(), "fc2.*").elements == 8 * 3 + 3


def test_string_initializers_are_not_counted() -> None:
    """Classifiers may store class names in a string initializer."""
    classes = onnx.TensorProto(
        name="names", data_type=g.STRING, dims=[4], string_data=[b"a", b"b", b"c", b"d"]
    )
    model = g.model(
        [
            g.node("MatMul", "x w", "y"),
            g.node("ArgMax", "y", "k", axis=1, keepdims=0),
            g.node("Gather", "names k", "label"),
        ],
        {"x": (2, 3)},
        {"y": (2, 4), "label": (2,)},
        {"w": g.random(3, 4)},
        types={"label": g.STRING},
    )
    model.graph.initializer.append(classes)
    assert onnxtrain.explain(model).elements == 3 * 4
