"""Training mode and evaluation mode of a graph."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes.batch_statistics import momentum_of, put_out_batch_statistics
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D

_MODES_SINCE = 14  # opset from which on BatchNormalization has a mode


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A running statistic: the value read, and the value that replaces it after the step."""

    name: str
    old: ir.Value
    new: ir.Value


def to_training(model: ir.Model, *, trainable: set[str]) -> list[str]:
    """Put BatchNormalization with a trainable scale into training mode, and Dropout on, in place.

    Args:
        model: a prepared model.
        trainable: names of the parameters that will be trained.

    Returns:
        A line for each kind of change.
    """
    changed, inside = {"BatchNormalization": 0, "Dropout": 0}, 0
    for node in nodes(model.graph, *changed, subgraphs=True):
        if node.op_type == "BatchNormalization":
            scale = node.inputs[1]
            if scale is None or scale.name not in trainable or _int(node, "training_mode"):
                continue
            if node.graph is not model.graph:
                inside += 1  # new statistics could not leave the body
                continue
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            changed["BatchNormalization"] += 1
        elif node.op_type == "Dropout" and not _always_on(node):
            op = OpBuilder(model.graph, "mode/")
            ratio = node.inputs[1] if len(node.inputs) > 1 else None
            node.resize_inputs(3)
            if ratio is None:
                node.replace_input_with(1, op.const(0.5, ir.DataType.FLOAT))
            node.replace_input_with(2, op.const(True))
            changed["Dropout"] += 1
    lines = [f"{kind} put into training mode: {n} node(s)" for kind, n in changed.items() if n]
    if inside:
        lines.append(f"BatchNormalization in a loop or branch left on its statistics: {inside}")
    return lines


def to_evaluation(model: ir.Model) -> list[str]:
    """Put BatchNormalization on its running statistics and drop Dropout, in place.

    The model need not be prepared: before opset 14, more than one output stood for training mode.
    """
    changed = {"BatchNormalization": 0, "Dropout": 0}
    old = model.opset_imports.get("", 0) < _MODES_SINCE
    for node in nodes(model.graph, *changed, subgraphs=True):
        if node.op_type == "BatchNormalization" and (
            _int(node, "training_mode") or (old and len(node.outputs) > 1)
        ):
            _restore_statistics(node)
            changed["BatchNormalization"] += 1
        elif node.op_type == "Dropout":
            _bypass(node)
            changed["Dropout"] += 1
    return [f"{kind} put into evaluation mode: {n} node(s)" for kind, n in changed.items() if n]


def separate_statistics(model: ir.Model) -> list[str]:
    """Let statistics that share an initializer with something else have their own, in place.

    Exporters that store equal tensors once make a fresh running variance and a fresh scale the same
    initializer, since both are ones.

    Returns:
        A line if something was changed.
    """
    graph, changed = model.graph, 0
    for node in nodes(graph, "BatchNormalization", subgraphs=True):
        for i, kind in ((3, "running_mean"), (4, "running_var")):
            x = node.inputs[i]
            if x is None or not x.is_initializer() or x.const_value is None:
                continue
            if all(_is_statistic(use.node, use.idx, i) for use in x.uses()):
                continue
            scale = node.inputs[1]
            stem = ((scale.name if scale is not None else "") or "norm").removesuffix(".weight")
            own = ir.Value(
                name=OpBuilder(graph).names.fresh(f"{stem}.{kind}"),
                type=x.type,
                shape=x.shape,
                const_value=ir.Tensor(x.const_value.numpy(), dtype=x.dtype),
            )
            graph.register_initializer(own)
            node.replace_input_with(i, own)
            changed += 1
    return [f"statistics stored apart from parameters: {changed}"] if changed else []


def _is_statistic(node: ir.Node, index: int, wanted: int) -> bool:
    return is_op(node, "BatchNormalization") and index == wanted


def running_statistics(model: ir.Model, op: OpBuilder, *, unbiased: bool = True) -> list[Buffer]:
    """Return the running statistics that training-mode BatchNormalization updates.

    ONNX averages the biased variance; with ``unbiased`` the batch's share is scaled by n / (n - 1),
    as torch does. Statistics that several nodes share are updated by each in turn.

    onnxruntime writes the new statistics over the old ones, wherever these come from. So the nodes
    are given zeros of their own, and what they put out is the batch's share alone: on CPU all of
    the batch's statistics, which the gradient needs as well, elsewhere what they add.
    """
    graph = model.graph
    newest: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, ir.Value] = {}
    for node in nodes(graph, "BatchNormalization"):
        if not _int(node, "training_mode"):
            continue
        kept, part = momentum_of(node), 1.0
        if op.target.prefers("batch-statistics-output"):
            part = 1.0 - kept
            put_out_batch_statistics(node)
        _name_statistics(op, node)
        for i, out in ((3, 1), (4, 2)):
            old = node.inputs[i]
            if old is None or not old.is_initializer():
                continue
            inside = op.before(node)
            # From the last share if there is one: equal expressions might become one value.
            node.replace_input_with(i, inside.Mul(last.get(old, old), 0.0))
            share = last[old] = node.outputs[out]
            before = op.Mul(newest.get(old, old), kept)
            if share.uses() or share.is_graph_output():
                share = _restore_meaning(op, share, part, before)
            elif part != 1.0:
                share = op.Mul(share, part)
            if i == 4 and unbiased:
                share = op.Mul(share, _bessel(op, node, share.dtype))
            newest[old] = op.Add(before, share)
    return [Buffer(old.name or "", old, new) for old, new in newest.items()]


def _name_statistics(op: OpBuilder, node: ir.Node) -> None:
    """Add the outputs for new statistics to a node: there are both or none."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for out, old in zip(node.outputs[1:], node.inputs[3:5], strict=True):
        if not out.name and old is not None:
            out.name = op.names.fresh(f"{op.prefix}{node.op_type}.share")
            out.type, out.shape = old.type, old.shape


def _restore_meaning(op: OpBuilder, share: ir.Value, part: float, before: ir.Value) -> ir.Value:
    """Let readers of a new statistic read its sum with the old one; return the batch's part."""
    name = share.name
    share.name = op.names.fresh(f"{name}.share")
    added = op.Mul(share, part)
    total = op.Add(before, added)
    scaler = added.producer()
    total.name = name
    share.replace_all_uses_with(total, replace_graph_outputs=True)
    assert scaler is not None
    scaler.replace_input_with(0, share)
    op.graph.sort()
    return added


def _bessel(op: OpBuilder, node: ir.Node, dtype: ir.DataType | None) -> ir.Value:
    """Return n / (n - 1), with n the number of values per channel."""
    x = node.inputs[0]
    assert x is not None
    axes = [i for i in range(op.rank(x)) if i != 1]
    sizes = D.numbers([op.dims(x)[i] for i in axes])
    if sizes is not None:
        count = math.prod(sizes)
        return op.const(count / max(count - 1, 1), dtype)
    n = op.cast(op.count(x, axes), dtype)
    # A single value has no spread: the share is zero then, and the factor must not be infinite.
    rest = op.Sub(n, 1.0)
    return op.Div(n, op.Where(op.Greater(rest, 0.0), rest, 1.0))


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def _always_on(node: ir.Node) -> bool:
    flag = node.inputs[2] if len(node.inputs) > 2 else None
    array = S.constant_of(flag)
    return array is not None and bool(array.reshape(-1)[0])


def _restore_statistics(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    for i, out in enumerate(node.outputs[1:3], 3):
        statistic = node.inputs[i]
        if statistic is None:
            continue
        if out.is_graph_output():
            _put_identity(node, statistic, out)
        out.replace_all_uses_with(statistic)
    node.resize_outputs(1)


def _put_identity(node: ir.Node, x: ir.Value, y: ir.Value) -> None:
    """Make ``x`` the graph output that ``y`` is, under the name that it has."""
    assert isinstance(node.graph, ir.Graph)
    identity = ir.Node("", "Identity", [x], num_outputs=1, version=node.version)
    new = identity.outputs[0]
    new.name, new.type, new.shape = y.name, y.type, y.shape
    identity.name = y.name
    y.name = f"{y.name}.replaced"
    node.graph.insert_before(node, identity)
    y.replace_all_uses_with(new, replace_graph_outputs=True)


def _bypass(node: ir.Node) -> None:
    x, y, graph = node.inputs[0], node.outputs[0], node.graph
    assert x is not None
    assert isinstance(graph, ir.Graph)
    if len(node.outputs) > 1 and node.outputs[1].uses():
        # Somebody reads the mask: leave the node, switched off.
        node.resize_inputs(2)
        return
    if y.is_graph_output():
        _put_identity(node, x, y)
    else:
        y.replace_all_uses_with(x)
    graph.remove(node, safe=True)
