"""Copy another ONNX model into the model to train: one that computes the loss, or a teacher."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.gradients import normalize, registered_domains
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
    mapping: dict[ir.Value, ir.Value] = {}
    for x in loss_model.graph.inputs:
        name = x.name or ""
        if name in by_name:
            mapping[x] = by_name[name]
        else:
            assert x.dtype is not None
            mapping[x] = op.input(name, x.dtype, S.dims_of(x))
    results = _copy_model(op, loss_model, mapping, "the loss model")
    return _find_scalar_output(loss_model, results)


def insert_frozen(op: OpBuilder, source: Any, names: Sequence[str | None]) -> list[ir.Value]:
    """Copy the nodes of a model that does not train; return some of its values.

    Its inputs are those of the model to train, by name; a single input may have another name.

    Args:
        op: builder of the graph of the model to train.
        source: the model.
        names: outputs or inner values; ``None`` is its only float output.
    """
    model = load(source, allow_domains=registered_domains())
    inputs = list(model.graph.inputs)
    given = {x.name or "": x for x in op.graph.inputs}
    if len(inputs) == 1 and inputs[0].name not in given:
        given[inputs[0].name or ""] = op.graph.inputs[0]
    unknown = [x for x in inputs if x.name not in given]
    if unknown:
        raise PrepareError(
            f"the teacher reads {_names(unknown)}, the model has {_names(op.graph.inputs)}\n"
            "hint: export both with the same input names"
        )
    _rename_sizes(inputs, given)
    model = normalize(model).model
    mapping = {x: given[x.name or ""] for x in model.graph.inputs}
    _copy_model(op, model, mapping, "the teacher")
    return [mapping.get(y, y) for y in (_find_value(model, name) for name in names)]


def _find_value(model: ir.Model, name: str | None) -> ir.Value:
    outputs = list(model.graph.outputs)
    if name is None:
        floats = [y for y in outputs if S.is_float(y)]
        floats = [y for y in floats if y.name == "logits"] or floats
        if len(floats) == 1:
            return floats[0]
        raise PrepareError(
            f"the teacher has several outputs: {_names(outputs)}\n"
            f"hint: Distillation(..., output={outputs[0].name!r})"
        )
    values = {y.name: y for node in model.graph for y in node.outputs}
    if name not in values:
        near = difflib.get_close_matches(name, [v for v in values if v], n=3, cutoff=0.5)
        raise PrepareError(
            f"the teacher has no value {name!r}\nhint: it has {', '.join(near) or _names(outputs)}"
        )
    return values[name]


def _copy_model(
    op: OpBuilder, model: ir.Model, mapping: dict[ir.Value, ir.Value], what: str
) -> list[ir.Value]:
    """Copy nodes and initializers of a model in the normal form; return the outputs' copies."""
    graph, opsets = model.graph, op.graph.opset_imports
    if graph.opset_imports[""] != opsets[""]:
        raise PrepareError(
            f"{what} has opset {graph.opset_imports['']}, the model {opsets['']}\n"
            "hint: export both for the same opset"
        )
    for domain, version in graph.opset_imports.items():
        opsets.setdefault(domain, version)
    for name, x in graph.initializers.items():
        assert x.const_value is not None
        copy = ir.Value(
            name=op.names.fresh(f"{op.prefix}{name}"),
            type=x.type,
            shape=x.shape,
            const_value=x.const_value,
        )
        op.graph.register_initializer(copy)
        mapping[x] = copy
    return copy_nodes(op, graph, mapping)


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
