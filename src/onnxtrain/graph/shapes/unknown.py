"""What is left open in a model: sizes of its inputs, and ranks that depend on them.

The rank that a value must have, by those who read it.

Symbolic sizes fixed to numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.symbolic import elements_in

_ROOT = "onnxtrain.root"  # key in Graph.meta: the graph with the inputs that users know
_GENERATED_PREFIXES = ("prepare/", "grad/", "step/")  # what names of ours start with


def symbolic_sizes(graph: ir.Graph) -> list[str]:
    """Return the sizes of a graph's inputs that are no numbers: ``batch``, or ``x[0]``."""
    names: dict[str, None] = {}
    for x in graph.inputs:
        for axis, d in enumerate(x.shape or ()):
            if not isinstance(d, int):
                names[d.value or f"{x.name}[{axis}]"] = None
    return list(names)


def record_root_graph(root: ir.Graph) -> None:
    """Record which graph its bodies belong to, for messages."""
    for node in root.all_nodes():
        for body in subgraphs_of(node):
            body.meta[_ROOT] = root


def unknown_rank_message(x: ir.Value) -> str:
    """Return a message on a value of unknown rank: where it was lost, and what would help."""
    lost = _first_unknown_rank(x)
    node = lost.producer()
    lines = [f"the rank of value {_name_in_file(lost)!r} is unknown"]
    if lost is not x and not _is_generated(x):
        lines[0] += f", and so is that of {x.name!r}"
    if node is not None:
        lines.append(f"  node {node.name!r}: {_unknown_rank_reason(node)}")
    graph = node.graph if node is not None else lost.graph
    sizes = symbolic_sizes(graph.meta.get(_ROOT, graph)) if isinstance(graph, ir.Graph) else []
    if sizes:
        example = ", ".join(f"{name!r}: 1" for name in sizes[:4])
        lines.append(f"hint: fix sizes that decide on it, dims={{{example}}}, say")
    else:
        lines.append("hint: give the model's inputs shapes, symbolic sizes are enough")
    return "\n".join(lines)


def _first_unknown_rank(x: ir.Value) -> ir.Value:
    """Return the value at which the rank got lost: what its node reads is known."""
    seen = {x}
    while True:
        node = x.producer()
        unknown = [
            v
            for v in (node.inputs if node is not None else ())
            if v is not None and v.shape is None and v not in seen and _is_tensor(v)
        ]
        if not unknown:
            return x
        x = unknown[0]
        seen.add(x)


def _is_tensor(x: ir.Value) -> bool:
    return x.type is None or isinstance(x.type, ir.TensorType)


def _is_generated(x: ir.Value) -> bool:
    return (x.name or "").startswith(_GENERATED_PREFIXES)


def _name_in_file(x: ir.Value) -> str:
    """Return the name of a value, or of the nearest one before it that the file has."""
    while _is_generated(x):
        node = x.producer()
        before = next((v for v in node.inputs if v is not None), None) if node else None
        if before is None:
            break
        x = before
    return x.name or ""


def _unknown_rank_reason(node: ir.Node) -> str:
    if node.op_type == "If":
        return "the branches of If give different ranks"
    if node.op_type == "Squeeze" and len(node.inputs) < 2:
        return "Squeeze without axes drops every size that is 1"
    if node.op_type == "Reshape":
        return "the shape that Reshape gets is computed"
    return f"{node.op_type} leaves it open"


_MAX_DEPTH = 64  # readers that are followed one behind the other
_RANK_PRESERVING = frozenset(
    (
        *("Identity", "Cast", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Gelu"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Sqrt", "Abs", "Neg", "Clip", "Dropout"),
        *("Erf", "HardSigmoid", "HardSwish", "Softplus", "BatchNormalization", "Slice"),
        *("Split", "CumSum", "LayerNormalization", "InstanceNormalization", "Pad", "Tile"),
    )
)
_REDUCTIONS = frozenset(
    f"Reduce{name}"
    for name in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
)


def required_rank(value: ir.Value, declared: dict[ir.Value, int]) -> int | None:
    """Return the rank without which some reader of a value could not run; ``None`` if any will do.

    Args:
        value: what is read.
        declared: ranks that the file states for outputs of the graph.
    """
    return _required(value, declared, _MAX_DEPTH)


def _required(value: ir.Value, declared: dict[ir.Value, int], depth: int) -> int | None:
    if value in declared:
        return declared[value]
    if depth == 0:
        return None
    home = value.graph
    for node, i in value.uses():
        if node.graph is not home:
            continue  # a body may not run
        rank = _by_schema(node, i)
        if rank is None:
            rank = _rank_before(node, i, lambda y: _required(y, declared, depth - 1))
        if rank is not None:
            return rank
    return None


def _by_schema(node: ir.Node, i: int) -> int | None:
    if is_op(node, "LSTM", "GRU", "RNN"):
        return 3 if i in (0, 1, 2, 5, 6) else None
    if is_op(node, "Conv", "ConvTranspose") and i == 0:
        w = node.inputs[1]
        return None if w is None or w.shape is None else len(w.shape)
    if is_op(node, "MaxPool", "AveragePool", "LpPool"):
        kernel = node.attributes.get("kernel_shape")
        return None if kernel is None else len(kernel.as_ints()) + 2
    if is_op(node, "Gemm") and i < 2:
        return 2
    if is_op(node, "DepthToSpace", "SpaceToDepth"):
        return 4
    if is_op(node, "Transpose"):
        perm = node.attributes.get("perm")
        return None if perm is None else len(perm.as_ints())
    if is_op(node, "Concat"):
        known = [x.shape for x in node.inputs if x is not None and x.shape is not None]
        return len(known[0]) if known else None
    return None


def _rank_before(node: ir.Node, i: int, after: Callable[[ir.Value], int | None]) -> int | None:
    """Return the rank before a node from the one behind it."""
    if is_op(node, "Add", "Sub", "Mul", "Div") and len(node.inputs) == 2:
        other = node.inputs[1 - i]
        rank = None if other is None or other.shape is None else after(node.outputs[0])
        # What has more axes gives its rank to the result.
        wider = rank is not None and other is not None and rank > len(other.shape or ())
        return rank if wider or rank == 0 else None
    if is_op(node, "Concat"):
        return after(node.outputs[0])
    if i != 0:
        return None
    if is_op(node, *_RANK_PRESERVING):
        return after(node.outputs[0])
    change = _rank_change(node)
    rank = None if change is None else after(node.outputs[0])
    return None if rank is None or change is None else rank - change


def _rank_change(node: ir.Node) -> int | None:
    """Return how many axes a node adds, ``None`` if that depends on values."""
    if is_op(node, "Unsqueeze", "Squeeze"):
        axes = elements_in(node, 1)
        return None if axes is None else len(axes) * (1 if node.op_type == "Unsqueeze" else -1)
    if is_op(node, *_REDUCTIONS):
        axes, keep = elements_in(node, 1), node.attributes.get("keepdims")
        if keep is None or keep.as_int():
            return 0
        return None if axes is None else -len(axes)
    if is_op(node, "Gather"):
        at = node.inputs[1]
        return None if at is None or at.shape is None else S.rank_of(at) - 1
    return None


def specialize(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """Replace symbolic dimensions by numbers, in place; return the model.

    A size is named as in the file, or by its place: ``"x[0]"`` is the first of the input ``x``.

    Raises:
        PrepareError: if no input has such a dimension.
    """
    if not sizes:
        return model
    bad = [f"{n}={v}" for n, v in sizes.items() if v < 1]
    if bad:
        raise PrepareError(f"sizes must be positive: {', '.join(bad)}")
    known = {s for x in model.graph.inputs for d in S.dims_of(x) or () for s in D.symbols(d)}
    values: dict[str, Dim] = {}
    absent = []
    for name, size in sizes.items():
        if D.symbol(name) in known:
            values[D.symbol(name)] = size
        elif not _fix_input_dim(model.graph, name, size, values):
            absent.append(name)
    if absent:
        raise PrepareError(
            f"no such dimension in `dims`: {', '.join(absent)}\n"
            f"hint: the inputs have {', '.join(symbolic_sizes(model.graph)) or 'fixed sizes only'}"
        )
    every = [*model.graph.inputs, *model.graph.outputs]
    every += [y for node in model.graph.all_nodes() for y in node.outputs]
    for x in every:
        dims = S.dims_of(x)
        if dims is not None:
            S.set_dims(x, [D.substitute(d, values) for d in dims])
    return model


def _fix_input_dim(graph: ir.Graph, place: str, size: int, values: dict[str, Dim]) -> bool:
    """Fix the dimension at ``x[0]``; return whether there is one that is open, or of that size."""
    name, bracket, rest = place.rpartition("[")
    x = next((x for x in graph.inputs if x.name == name), None)
    dims = None if x is None else S.dims_of(x)
    if not bracket or x is None or dims is None or not rest.removesuffix("]").isdecimal():
        return False
    axis = int(rest.removesuffix("]"))
    if axis >= len(dims) or (isinstance(dims[axis], int) and dims[axis] != size):
        return False
    d = dims[axis]
    if isinstance(d, str) and d.isidentifier():
        values[d] = size
    else:
        S.set_dims(x, [size if i == axis else d for i, d in enumerate(dims)])
    return True
