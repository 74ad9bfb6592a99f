"""A node on its way to an older form: the forms read and change this, not the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S


class UnfitError(Exception):
    """Why a node has no form in an opset."""


Operand = ir.Value | np.ndarray | None
"""An input of a draft: a value, a constant to be made, or nothing."""


@dataclass
class Draft:
    """Operator, inputs and attributes of a node as some opset has them."""

    op_type: str
    inputs: list[Operand]
    attributes: dict[str, ir.Attr]
    node: ir.Node
    opset: int
    """The opset that the node is written in."""

    def input(self, i: int) -> Operand:
        """Return an input, ``None`` if it is left out."""
        return self.inputs[i] if i < len(self.inputs) else None

    def constant(self, i: int, what: str) -> np.ndarray | None:
        """Return a constant input, ``None`` if it is left out; unfit if it is computed."""
        x = self.input(i)
        if x is None or isinstance(x, np.ndarray):
            return x
        array = S.constant_of(x)
        if array is None:
            elements = S.symbolic_of(x)
            if elements is None or not all(isinstance(e, int) for e in elements):
                raise UnfitError(f"{what} of {self.op_type} must be constant there")
            array = np.asarray(elements, np.int64).reshape(() if S.dims_of(x) == () else (-1,))
        return array

    def get(self, name: str) -> Any:
        """Return an attribute, its default if it is not set."""
        if name in self.attributes:
            return S.python_value(self.attributes[name])
        return default_of(self.node.op_type, self.opset, name)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self.attributes |= {a.name: a for a in ir.convenience.convert_attributes({name: value})}

    def drop(self, name: str, *defaults: Any) -> None:
        """Remove an attribute; unfit if it is none of ``defaults``."""
        value = self.get(name)
        if value is not None and value not in defaults:
            raise UnfitError(f"{self.op_type} has no {name}={value!r} there")
        self.attributes.pop(name, None)

    def keep_inputs(self, count: int) -> None:
        """Drop all inputs behind the first ``count``."""
        del self.inputs[count:]

    def has_rank(self) -> bool:
        """Return whether the rank of the first input is known."""
        x = self.inputs[0]
        return isinstance(x, ir.Value) and x.shape is not None

    def rank(self) -> int:
        """Return the rank of the first input."""
        x = self.inputs[0]
        if not isinstance(x, ir.Value) or x.shape is None:
            raise UnfitError(f"the rank of the input of {self.op_type} is unknown")
        return len(x.shape)

    def dims(self, i: int = 0) -> tuple[Any, ...]:
        """Return the sizes of an input."""
        x = self.inputs[i]
        dims = S.dims_of(x) if isinstance(x, ir.Value) else None
        if dims is None:
            raise UnfitError(f"the rank of an input of {self.op_type} is unknown")
        return dims


def default_of(op_type: str, opset: int, name: str) -> Any:
    """Return the default of an attribute at an opset, ``None`` if there is none."""
    schema = S.schema_of(op_type, opset)
    formal = None if schema is None else schema.attributes.get(name)
    if formal is None or not formal.default_value.type:
        return None
    return S.python_value(ir.serde.deserialize_attribute(formal.default_value))


def fit(draft: Draft, opset: int) -> None:
    """Finish a draft by the schema of an opset, in place.

    Raises:
        UnfitError: if the schema does not allow it.
    """
    schema = S.schema_of(draft.op_type, opset)
    if schema is None or schema.deprecated:
        raise UnfitError(f"no {draft.op_type} in opset {opset}")
    kept = draft.op_type == draft.node.op_type
    for name in [n for n in draft.attributes if n not in schema.attributes]:
        value = S.python_value(draft.attributes[name])
        default = default_of(draft.node.op_type, draft.opset, name) if kept else None
        if value != default:
            raise UnfitError(f"{draft.op_type} has no attribute {name} in opset {opset}")
        del draft.attributes[name]
    for name, formal in schema.attributes.items():
        if name in draft.attributes:
            continue
        old = default_of(draft.op_type, opset, name)
        new = default_of(draft.op_type, draft.opset, name) if kept else None
        if new is not None and new != old:
            draft.set(name, new)
        elif formal.required:
            raise UnfitError(f"{draft.op_type} needs attribute {name} in opset {opset}")
    while draft.inputs and draft.inputs[-1] is None:
        draft.inputs.pop()
    count = len(draft.inputs)
    if not schema.min_input <= count <= schema.max_input:
        raise UnfitError(f"{draft.op_type} with {count} inputs is not in opset {opset}")
    if len(draft.node.outputs) > schema.max_output:
        used = [y for y in draft.node.outputs[schema.max_output :] if y.uses()]
        if used:
            raise UnfitError(f"{draft.op_type} has no output {used[0].name!r} in opset {opset}")
    _fit_types(draft, schema, opset)


def _fit_types(draft: Draft, schema: onnx.defs.OpSchema, opset: int) -> None:
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    sides = ((draft.inputs, schema.inputs), (draft.node.outputs, schema.outputs))
    bound: dict[str, ir.DataType] = {}
    for values, formal in sides:
        for i, x in enumerate(values):
            if not isinstance(x, ir.Value) or not isinstance(x.type, ir.TensorType) or not x.name:
                continue
            slot = formal[min(i, len(formal) - 1)]
            kind = f"tensor({x.type.dtype.name.lower()})"
            kinds = allowed.get(slot.type_str, {slot.type_str})
            if kind not in kinds:
                raise UnfitError(
                    f"{draft.op_type} of {x.type.dtype.name.lower()} is not in opset {opset}"
                )
            if slot.type_str in allowed and (
                slot.option != onnx.defs.OpSchema.FormalParameterOption.Variadic
                or slot.is_homogeneous
            ):
                first = bound.setdefault(slot.type_str, x.type.dtype)
                if first != x.type.dtype:
                    raise UnfitError(
                        f"{draft.op_type} of {first.name.lower()} and {x.type.dtype.name.lower()} "
                        f"is not in opset {opset}"
                    )
