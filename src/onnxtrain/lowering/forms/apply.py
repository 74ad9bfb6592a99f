"""Every node of a model in the form that an older opset has for it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.forms.registry import draft_at


def apply_forms(model: ir.Model, opset: int, prefix: str = "lower/") -> None:
    """Give every node of the standard domain the form that an opset has, in place; stamp the model.

    Args:
        model: of the working opset.
        opset: of the result, not newer.
        prefix: what names of new constants start with.

    Raises:
        UnfitError: if the opset cannot express a node.
    """
    constants = _Constants(model.graph, prefix)
    _apply(model.graph, constants, opset, model.opset_imports[""])
    model.opset_imports[""] = opset


def _apply(graph: ir.Graph, constants: _Constants, opset: int, working: int) -> None:
    for node in list(graph):
        for body in subgraphs_of(node):
            _apply(body, constants, opset, working)
        if not is_standard(node):
            continue
        new = draft_at(node, opset, working)
        outputs = list(node.outputs)
        schema = S.schema_of(new.op_type, opset)
        assert schema is not None
        count = min(len(outputs), schema.max_output)
        replacement = ir.Node(
            "",
            new.op_type,
            [constants.value(x) if isinstance(x, np.ndarray) else x for x in new.inputs],
            list(new.attributes.values()),
            num_outputs=count,
            name=node.name,
            version=opset,
        )
        graph.insert_before(node, replacement)
        for old, y in zip(outputs, replacement.outputs, strict=False):
            y.name, y.type, y.shape = old.name, old.type, old.shape
            y.meta.update(old.meta)  # sizes that are known by name
            if old.name:
                old.name = f"{old.name}.old"
            old.replace_all_uses_with(y, replace_graph_outputs=True)
        graph.remove(node, safe=True)


class _Constants:
    """Initializers for the arrays that forms need, one for equal arrays."""

    def __init__(self, root: ir.Graph, prefix: str) -> None:
        self.root = root
        self.prefix = prefix
        self.made: dict[bytes, ir.Value] = {}

    def value(self, array: np.ndarray) -> ir.Value:
        """Return the initializer of an array."""
        key = array.tobytes() + str((array.dtype, array.shape)).encode()
        if key not in self.made:
            name = f"{self.prefix}form_{len(self.made)}"
            while name in self.root.initializers:
                name += "_"
            tensor = ir.Tensor(array, name=name)
            value = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.root.register_initializer(value)
            self.made[key] = value
        return self.made[key]
