"""Convert a model to the working opset: older models go up, newer ones come down where they can.

The version converter of onnx does most of the work. Three repairs run before it:

``convert_with_repairs`` fixes conversions that change results. Bounds of Clip and the value of Pad
become float32 whatever the dtype; Upsample and Resize lose their coordinate mode; Hardmax keeps its
axis although the meaning changed; GroupNormalization gets scales of the wrong shape.

``convert_training_batch_norms`` handles BatchNormalization in training mode below opset 14, which
the converter rejects. There more than one output means training. Since 14 an attribute does, and
the outputs are the normalized value and the two running statistics.

``move_runtime_operators`` handles operators that onnxruntime's optimizer writes into the standard
domain: LayerNormalization in files of any opset (the standard has it since 17),
SimplifiedLayerNormalization, which no opset has, and a few more. The converter fails with an
assertion on each. They move to ``com.microsoft``, where they have decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.expand.expansions import decompose, is_decomposed
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.writer import ONNX_ERRORS, transform_proto
from onnxtrain.graph.nodes import is_op, is_standard, nodes
from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN
from onnxtrain.graph.shapes.inference import check_before_conversion, infer_shapes
from onnxtrain.importer.constants import lift_constants
from onnxtrain.importer.functions import (
    PREVIEW_DOMAIN,
    inline_bodies,
    inline_functions,
    inline_preview,
)

_INPUTS_SINCE = 11  # bounds of Clip and the value of Pad are inputs, Resize has coordinate modes
_ONE_AXIS_SINCE = 13  # Softmax, LogSoftmax and Hardmax use one axis, not a flattened matrix
_PER_CHANNEL_SINCE = 21  # GroupNormalization has a scale per channel, not per group


def convert_with_repairs(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the converted model; repaired operators keep their meaning."""
    opset = max((o.version for o in model.opset_import if is_standard(o)), default=0)
    wrong: dict[str, Callable[..., list[onnx.NodeProto]]] = {}
    if opset < _INPUTS_SINCE:
        wrong.update(Clip=_cast_like_first, Pad=_cast_like_first, Upsample=_asymmetric_coordinates)
        wrong.update(Resize=_asymmetric_coordinates)  # or as _resize_repair says
    if opset < _PER_CHANNEL_SINCE:
        wrong.update(GroupNormalization=_per_channel)
    if opset < _ONE_AXIS_SINCE:
        for graph in _all_graphs(model.graph):
            _flatten_hardmax(graph)
    marked = {
        (_RENAMED.get(n.op_type, n.op_type), n.output[0]): (
            _resize_repair(model.graph, n) if n.op_type == "Resize" else wrong[n.op_type],
            list(n.input),
        )
        for graph in _all_graphs(model.graph)
        for n in graph.node
        if n.op_type in wrong and is_standard(n)
    }
    converted = convert(model)
    if marked:
        for graph in _all_graphs(converted.graph):
            _repair(graph, marked)
    return converted


_RENAMED = {"Upsample": "Resize"}


def _repair(graph: onnx.GraphProto, marked: dict) -> None:
    nodes = []
    for node in graph.node:
        mark = marked.get((node.op_type, node.output[0])) if node.output else None
        if mark is not None:
            repair, inputs = mark
            nodes += repair(node, inputs)
        nodes.append(node)
    if len(nodes) > len(graph.node):
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _cast_like_first(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Cast attributes that became inputs to the dtype of the first input."""
    casts = []
    for i in (1, 2) if node.op_type == "Clip" else (2,):
        if i < len(node.input) and node.input[i]:
            name = f"{node.output[0]}.raised.{i}"
            casts.append(_node("CastLike", [node.input[i], node.input[0]], name))
            node.input[i] = name
    return casts


def _asymmetric_coordinates(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Sample at ``i / scale``; nearest rounds down."""
    return _set_coordinate_mode(node, "floor")


def _asymmetric_coordinates_downsample(
    node: onnx.NodeProto, inputs: list[str]
) -> list[onnx.NodeProto]:
    """Sample at ``i / scale``; nearest rounds up, as in onnxruntime."""
    return _set_coordinate_mode(node, "ceil")


def _set_coordinate_mode(node: onnx.NodeProto, nearest: str) -> list[onnx.NodeProto]:
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": nearest}
    kept = [a for a in node.attribute if a.name not in modes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(ir.to_proto(ir.AttrString(*mode)) for mode in modes.items())])
    return []


def _resize_repair(
    graph: onnx.GraphProto, node: onnx.NodeProto
) -> Callable[..., list[onnx.NodeProto]]:
    """Return the repair for a Resize of opset 10, whose rounding depends on up- or downsampling."""
    if any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
        return _asymmetric_coordinates
    scales = _initializer_array(graph, node.input[1])
    if scales is not None and (scales >= 1).all():
        return _asymmetric_coordinates
    if scales is not None and (scales <= 1).all():
        return _asymmetric_coordinates_downsample
    raise RuntimeError(
        f"Resize of opset 10 at {node.output[0]!r} may shrink one axis and grow another"
    )


def _initializer_array(graph: onnx.GraphProto, name: str) -> np.ndarray | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return ir.from_proto(tensor).numpy()
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and node.output[0] == name
            and node.attribute[0].name == "value"
        ):
            return ir.from_proto(node.attribute[0].t).numpy()
    return None


def _per_channel(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Repeat the scale and bias of each group for its channels."""
    y = node.output[0]
    (groups,) = (a.i for a in node.attribute if a.name == "num_groups")
    nodes = [
        _node(
            "Shape", [inputs[0]], f"{y}.channels", ir.AttrInt64("start", 1), ir.AttrInt64("end", 2)
        ),
        _node("Constant", [], f"{y}.groups", ir.AttrInt64s("value_ints", [groups])),
        _node("Div", [f"{y}.channels", f"{y}.groups"], f"{y}.size"),
        _node("Concat", [f"{y}.groups", f"{y}.size"], f"{y}.table", ir.AttrInt64("axis", 0)),
        _node("Constant", [], f"{y}.column", ir.AttrInt64s("value_ints", [-1, 1])),
        _node("Constant", [], f"{y}.row", ir.AttrInt64s("value_ints", [-1])),
    ]
    for i in (1, 2):
        name = f"{y}.raised.{i}"
        nodes += [
            _node("Reshape", [inputs[i], f"{y}.column"], f"{name}.column"),
            _node("Expand", [f"{name}.column", f"{y}.table"], f"{name}.table"),
            _node("Reshape", [f"{name}.table", f"{y}.row"], name),
        ]
        node.input[i] = name
    return nodes


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Make the flattening of Hardmax explicit: axes before ``axis`` by axes from ``axis`` on."""
    nodes = []
    for node in graph.node:
        if not is_op(node, "Hardmax"):
            nodes.append(node)
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        (x,), (y,) = node.input, node.output
        nodes += [
            _node("Shape", [x], f"{y}.shape"),
            _node("Flatten", [x], f"{y}.flat", ir.AttrInt64("axis", axis)),
            _node("Hardmax", [f"{y}.flat"], f"{y}.picked", ir.AttrInt64("axis", 1)),
            _node("Reshape", [f"{y}.picked", f"{y}.shape"], y),
        ]
    if len(nodes) > len(graph.node):
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _node(op_type: str, inputs: list[str], output: str, *attributes: ir.Attr) -> onnx.NodeProto:
    return onnx.NodeProto(
        op_type=op_type,
        input=inputs,
        output=[output],
        attribute=[ir.to_proto(a) for a in attributes],
    )


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_graphs(attribute.g)


_SINCE_ATTRIBUTE = 14


def convert_training_batch_norms(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the converted model; BatchNormalization nodes keep their training mode."""
    opset = max((o.version for o in model.opset_import if is_standard(o)), default=0)
    if opset >= _SINCE_ATTRIBUTE:
        return convert(model)
    used = _used_names(model.graph)
    training = set()
    for node in _batch_norms(model.graph):
        # If a node reads a statistic, the model stays as it is and the converter reports the error.
        if len(node.output) > 1 and not used.intersection(node.output[1:]):
            training.add(node.output[0])
            del node.output[1:]
    converted = convert(model)
    for node in _batch_norms(converted.graph):
        if node.output[0] in training:
            node.output.extend(f"{node.output[0]}.running_{kind}" for kind in ("mean", "var"))
            node.attribute.add(name="training_mode", type=onnx.AttributeProto.INT, i=1)
    return converted


def _batch_norms(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if is_op(node, "BatchNormalization"):
            yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _batch_norms(attribute.g)


def _used_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names that nodes and graph outputs read, including subgraphs."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= _used_names(attribute.g)
    return names - {""}


RUNTIME_OPERATORS = frozenset(
    {
        *("Affine", "Crop", "DynamicSlice", "ImageScaler"),
        *("LayerNormalization", "ParametricSoftplus", "Scale", "ScaledTanh"),
        *("SimplifiedLayerNormalization", "ThresholdedRelu"),
    }
)
"""Operators that only onnxruntime defines in the standard domain."""


def move_runtime_operators(model: ir.Model, opset: int) -> None:
    """Move nodes that only onnxruntime defines at this opset to its own domain, in place.

    Raises:
        PrepareError: the standard domain has unknown operators.
    """
    unknown: list[ir.Node] = []
    for node in nodes(model.graph, subgraphs=True):
        if S.schema_of(node.op_type, opset) is not None:
            continue
        if node.op_type in RUNTIME_OPERATORS:
            node.domain = RUNTIME_DOMAIN
            node.version = None
            model.opset_imports.setdefault(RUNTIME_DOMAIN, 1)
        elif not onnx.defs.has(node.op_type):
            unknown.append(node)
    if unknown:
        kinds = ", ".join(sorted({n.op_type for n in unknown}))
        lines = [f"operators that ONNX does not define: {kinds}"]
        lines += [f"  node {n.name!r}: {S.describe(n)}" for n in unknown[:10]]
        lines.append(
            "hint: name the domain that defines them, and give rules with onnxtrain.register_vjp"
        )
        raise PrepareError("\n".join(lines))


OPSET = 21
IR_VERSION = 10
NEWEST_OPSET = 26
"""The newest opset that onnxruntime loads."""
NEWEST_IR = 13
_UNBATCHED_SCAN = 9


def to_working_opset(
    model: ir.Model,
    *,
    fused: Callable[[str], bool] = lambda key: True,
    keep: Callable[[ir.Node], bool] = lambda node: False,
) -> ir.Model:
    """Return the model at the working opset, or at its own if it cannot be downgraded.

    Args:
        model: must not be used any more.
        fused: whether to decompose an operator of another domain.
        keep: whether a node of another domain stays as it is.

    Raises:
        PrepareError: the opset is newer than runtimes accept, or an old operator has no successor.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if "ai.onnx" in model.opset_imports:
        del model.opset_imports["ai.onnx"]
    model.opset_imports[""] = opset or OPSET
    move_runtime_operators(model, opset or OPSET)
    model, _ = to_loadable(model)
    opset = min(opset, NEWEST_OPSET)
    if opset and opset != OPSET:
        check_before_conversion(model)
    if not opset or opset == OPSET:
        pass
    elif opset < OPSET:
        model = _upgrade(model)
    else:
        model = _downgrade(model, opset, fused, keep)
    newest = model.opset_imports[""]
    model.ir_version = IR_VERSION if newest == OPSET else min(max(model.ir_version, 11), NEWEST_IR)
    for node in model.graph.all_nodes():
        node.version = newest if is_standard(node) else node.version
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    return model


def _upgrade(model: ir.Model) -> ir.Model:
    batched = nodes(model.graph, "Scan", subgraphs=True)
    if batched and model.opset_imports[""] < _UNBATCHED_SCAN:
        raise PrepareError(
            f"Scan of opset 8 has a batch axis, later versions do not: node {batched[0].name!r}\n"
            "hint: export the model again with opset 9 or newer"
        )
    model.ir_version = max(model.ir_version, 8)  # below 4, initializers must be inputs
    try:
        return transform_proto(model, lambda proto: convert_training_batch_norms(proto, _convert))
    except ONNX_ERRORS as error:
        raise PrepareError(
            f"cannot convert the model from opset {model.opset_imports['']} to {OPSET}: "
            f"{S.first_line(error)}\nhint: export it again with opset 13 or newer"
        ) from error


def _convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    return convert_with_repairs(proto, lambda p: onnx.version_converter.convert_version(p, OPSET))


def _downgrade(
    model: ir.Model,
    opset: int,
    fused: Callable[[str], bool],
    keep: Callable[[ir.Node], bool],
) -> ir.Model:
    model = inline_bodies(
        model, lambda op_type: _is_newer_op(op_type) and not is_decomposed(op_type)
    )
    lift_constants(model)
    decompose(model, only=lambda key: fused(key) if "::" in key else _is_newer_op(key), keep=keep)
    infer_shapes(model.graph, opset)  # `_same_at` reads dtypes
    if all(_same_at(OPSET, n, opset) for n in model.graph.all_nodes()):
        model.opset_imports[""] = OPSET
    return model


def _is_newer_op(op_type: str) -> bool:
    return S.schema_of(op_type, OPSET) is None


def to_loadable(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """Return the model in operators that runtimes load, and a line per change.

    Models of :data:`NEWEST_OPSET` or older come back as they are. Newer ones get that opset. Nodes
    that it does not have become their function bodies, and nodes that only accept more types since
    then compute in float32. Operators of ``ai.onnx.preview`` become their bodies at any opset.

    Raises:
        PrepareError: a node of a newer opset has neither.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    preview = sorted({n.op_type for n in model.graph.all_nodes() if n.domain == PREVIEW_DOMAIN})
    if opset <= NEWEST_OPSET and not preview:
        return model, []
    if model.functions:
        model = inline_functions(model)
    infer_shapes(model.graph, opset)
    model = inline_preview(model)
    expanded = list(preview)
    if opset > NEWEST_OPSET:
        if preview:
            infer_shapes(model.graph, opset)
        new = {n.op_type for n in _newer_nodes(model, opset) if not _compute_in_float32(n)}
        expanded += sorted(new)
        own = {n.op_type for n in model.graph.all_nodes()} - new
        # A body may bring other new operators, such as Swish, for which runtimes lack kernels.
        fresh = lambda op: op not in own and _is_newer_op(op)  # noqa: E731
        model = inline_bodies(model, lambda op: op in new or (fresh(op) and not is_decomposed(op)))
        decompose(model, only=lambda key: "::" not in key and fresh(key))
        infer_shapes(model.graph, opset)
        blocked = [n for n in _newer_nodes(model, opset) if not _compute_in_float32(n)]
        if blocked:
            lines = [f"  node {n.name!r}: {S.describe(n)}" for n in blocked[:10]]
            raise PrepareError(
                f"opset {opset} is newer than runtimes support ({NEWEST_OPSET}), and these nodes "
                "cannot be downgraded:\n" + "\n".join(lines) + "\n"
                f"hint: export the model with opset {NEWEST_OPSET} or older"
            )
        model.opset_imports[""] = NEWEST_OPSET
        for node in model.graph.all_nodes():
            node.version = NEWEST_OPSET if is_standard(node) else node.version
    model.opset_imports.pop(PREVIEW_DOMAIN, None)
    lift_constants(model)
    lines = [f"opset {opset} brought to {NEWEST_OPSET}"] if opset > NEWEST_OPSET else []
    if expanded:
        lines.append(f"expanded, because no runtime has them: {', '.join(expanded)}")
    return model, lines


def _newer_nodes(model: ir.Model, opset: int) -> list[ir.Node]:
    """Return the nodes that do not mean the same at the newest opset of runtimes."""
    return [n for n in model.graph.all_nodes() if not _same_at(NEWEST_OPSET, n, opset)]


def _compute_in_float32(node: ir.Node) -> bool:
    """Cast 16-bit inputs that the newest opset of runtimes rejects; return whether that helped."""
    old = S.schema_of(node.op_type, NEWEST_OPSET)
    graph = node.graph
    if old is None or graph is None or any(n not in old.attributes for n in node.attributes):
        return False
    inputs = [(i, x) for i, x in enumerate(node.inputs) if x is not None and x.dtype in _HALVES]
    outputs = [y for y in node.outputs if y.dtype in _HALVES]
    if not inputs:
        return False
    taken = {y.name for n in graph for y in n.outputs}

    def cast(x: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        while name in taken:
            name += "_"
        taken.add(name)
        new = ir.Node("", "Cast", [x], [ir.AttrInt64("to", int(dtype))], num_outputs=1, name=name)
        out = new.outputs[0]
        out.name, out.type, out.shape = name, ir.TensorType(dtype), x.shape
        (graph.insert_before if dtype == _FLOAT else graph.insert_after)(node, new)
        return out

    for i, x in inputs:
        node.replace_input_with(i, cast(x, _FLOAT, f"{x.name}.float32"))
    for y in outputs:
        assert y.dtype is not None
        new = cast(y, y.dtype, f"{y.name}.rounded")
        for use in list(y.uses()):
            if use.node is not new.producer():
                use.node.replace_input_with(use.idx, new)
        for i, out in enumerate(graph.outputs):
            if out is y:
                graph.outputs[i] = new
                y.name, new.name = new.name, y.name
        y.type = ir.TensorType(_FLOAT)
    return True


_FLOAT = ir.DataType.FLOAT
_HALVES = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def _same_at(older: int, node: ir.Node, opset: int) -> bool:
    """Return whether a node means the same at an older opset: newer ones only add types."""
    if not is_standard(node):
        return True
    new, old = S.schema_of(node.op_type, opset), S.schema_of(node.op_type, older)
    if new is None or old is None:
        return new is None
    if new.since_version == old.since_version:
        return True
    added = {
        n for n in node.attributes if n not in old.attributes and not _is_default(node, n, new)
    }
    if node.op_type in ("Cast", "CastLike"):
        added.discard("round_mode")  # only affects float8e8m0, which cannot be downgraded
    if added or len(node.inputs) > old.max_input or len(node.outputs) > old.max_output:
        return False
    if not _types_fit(node.inputs, old.inputs, old) or not _types_fit(
        node.outputs, old.outputs, old
    ):
        return False
    for name in [n for n in node.attributes if n not in old.attributes]:
        node.attributes.pop(name)
    return True


def _is_default(node: ir.Node, name: str, schema: onnx.defs.OpSchema) -> bool:
    attribute = schema.attributes.get(name)
    if attribute is None or not attribute.default_value.type:
        return False
    default = ir.serde.deserialize_attribute(attribute.default_value)
    return S.python_value(node.attributes[name]) == S.python_value(default)


def _types_fit(
    values: Sequence[ir.Value | None],
    formal: Sequence[onnx.defs.OpSchema.FormalParameter],
    schema: onnx.defs.OpSchema,
) -> bool:
    """Return whether the working opset allows the dtypes: no bfloat16 in Conv, no int2 ..."""
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    for i, x in enumerate(values):
        if x is None or not isinstance(x.type, ir.TensorType) or not formal:
            continue
        kinds = allowed.get(formal[min(i, len(formal) - 1)].type_str)
        if kinds is not None and f"tensor({x.type.dtype.name.lower()})" not in kinds:
            return False
    return True
