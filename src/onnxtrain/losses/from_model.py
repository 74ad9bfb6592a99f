"""Use another ONNX model as the loss: copy its nodes into the model to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.gradients import normalize
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_nodes
from onnxtrain.graph.io import load
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim


def insert_model(
    model: ir.Model,
    op: OpBuilder,
    source: Any,
    outputs: Sequence[ir.Value],
    chosen: Sequence[ir.Value] = (),
) -> ir.Value:
    """Copy the nodes of a loss model; return its scalar output.

    Inputs of the loss model are matched by name with ``outputs``, then with inputs of the model.
    The others become new inputs. Its initializers become constants.

    Args:
        model: the model to train.
        op: builder of its graph.
        source: the loss model.
        outputs: outputs of the model to train.
        chosen: values for the first inputs of the loss model, regardless of their names.
    """
    loss_model = load(source)
    inputs = list(loss_model.graph.inputs)
    given = dict(zip((x.name or "" for x in inputs), chosen, strict=False))
    by_name = {x.name or "": x for x in (*model.graph.inputs, *outputs)} | given
    if not any(x.name in given or x.name in {y.name for y in outputs} for x in inputs):
        raise PrepareError(
            f"the loss model reads no output of the model: its inputs are {_names(inputs)}, "
            f"the outputs are {_names(outputs)}\n"
            "hint: name its inputs after outputs, or use LossTerm(loss_model, output=[...])"
        )
    _rename_sizes(inputs, by_name)
    loss_model = normalize(loss_model).model
    if loss_model.opset_imports[""] != model.opset_imports[""]:
        raise PrepareError(
            f"the loss model has opset {loss_model.opset_imports['']}, "
            f"the model {model.opset_imports['']}\nhint: export both for the same opset"
        )
    for domain, version in loss_model.opset_imports.items():
        model.graph.opset_imports.setdefault(domain, version)

    mapping: dict[ir.Value, ir.Value] = {}
    for x in loss_model.graph.inputs:
        name = x.name or ""
        if name in by_name:
            mapping[x] = by_name[name]
        else:
            assert x.dtype is not None
            mapping[x] = op.input(name, x.dtype, S.dims_of(x))
    for name, x in loss_model.graph.initializers.items():
        assert x.const_value is not None
        copy = ir.Value(
            name=op.names.fresh(f"{op.prefix}{name}"),
            type=x.type,
            shape=x.shape,
            const_value=x.const_value,
        )
        model.graph.register_initializer(copy)
        mapping[x] = copy
    results = copy_nodes(op, loss_model.graph, mapping)
    return _find_scalar_output(loss_model, results)


def _rename_sizes(inputs: Sequence[ir.Value], by_name: dict[str, ir.Value]) -> None:
    """Rename symbolic dimensions of the loss model to those of the model to train."""
    names: dict[str, Dim] = {}
    for x in inputs:
        value = by_name.get(x.name or "")
        if value is not None:
            _check_type_and_shape(x, value)
            for mine, theirs in zip(S.dims_of(x) or (), S.dims_of(value) or (), strict=False):
                if isinstance(mine, str):
                    names.setdefault(mine, theirs)
            x.shape = value.shape
    for x in inputs:
        dims = S.dims_of(x)
        if x.name not in by_name and dims is not None:
            S.set_dims(x, [D.substitute(d, names) for d in dims])


def _find_scalar_output(loss_model: ir.Model, results: Sequence[ir.Value]) -> ir.Value:
    names = [y.name for y in loss_model.graph.outputs]
    if len(results) == 1:
        return results[0]
    scalars = [y for y in results if S.is_float(y) and S.dims_of(y) in ((), (1,))]
    if len(scalars) == 1:
        return scalars[0]
    if "loss" in names:
        return results[names.index("loss")]
    raise PrepareError(
        f"the loss model has several outputs: {', '.join(map(str, names))}\n"
        "hint: give it one scalar output, or name the loss 'loss'"
    )


def _check_type_and_shape(x: ir.Value, value: ir.Value) -> None:
    have, want = S.dims_of(value), S.dims_of(x)
    other_type = x.dtype is not None and x.dtype != value.dtype
    if other_type or (have is not None and want is not None and D.shapes_differ(have, want)):
        raise ShapeError(
            f"the loss model expects {S.describe_value(x)}, but the model has "
            f"{S.describe_value(value)}"
        )


def _names(values: Sequence[ir.Value]) -> str:
    return ", ".join(v.name or "" for v in values)
