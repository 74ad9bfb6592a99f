"""The estimate of training memory."""

from __future__ import annotations

import onnx

import onnxtrain
from tests.artifacts.models import classifier
from tests.wild import graphs as g

NUMBERS = 6 * 8 + 8 + 8 * 3 + 3


def test_an_estimate_by_hand() -> None:
    memory = onnxtrain.explain(classifier(), dims={"batch": 10}).memory
    assert memory.parameters == memory.gradients == NUMBERS * 4
    assert memory.adam_state == 2 * NUMBERS * 4
    assert memory.activations == 10 * (8 + 8 + 3) * 4
    assert (memory.sizes, memory.unknown) == ({"batch": 10}, 0)
    assert memory.total == 4 * NUMBERS * 4 + memory.activations
    text = str(memory)
    assert text.startswith("about 2.09 kB to train with Adam at batch = 10: parameters 332 B")
    assert "memory: about 2.09 kB" in str(onnxtrain.explain(classifier(), dims={"batch": 10}))


def test_sizes_count_as_one_unless_given() -> None:
    memory = onnxtrain.explain(classifier(), "fc2.*").memory
    assert memory.sizes == {"batch": 1}
    assert memory.parameters == (8 * 3 + 3) * 4
    assert memory.activations == (8 + 8 + 3) * 4


def test_strings_have_no_size() -> None:
    """A classifier that names its classes is explained like any other."""
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
    explained = onnxtrain.explain(model)
    assert explained.memory.parameters == 3 * 4 * 4
