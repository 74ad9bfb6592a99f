"""Products with packed weights that round their input too: in training it stays as it is."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.io.imports import RUNTIME_DOMAIN


def exact_products(model: ir.Model) -> list[str]:
    """Take away leave to round the input to 8 bits, in place; return a line if there was any.

    Gradients of a product are those of its float operands: with level 4 the forward pass would be
    off by the better part of a percent, and with scales that are no constants onnxruntime gives
    zeros.
    """
    count = 0
    for node in model.graph.all_nodes():
        if node.domain != RUNTIME_DOMAIN or "accuracy_level" not in node.attributes:
            continue
        count += node.attributes.pop("accuracy_level").as_int() != 0
    if not count:
        return []
    return [f"{count} product(s) with packed weights do not round their input (accuracy_level 0)"]
