"""Unknown sizes and ranks: explain them, infer a rank from its readers, fix symbolic sizes.

:func:`unknown_rank_message` names the operator that lost a rank. :func:`required_rank` finds the
rank that the readers of a value need. :func:`specialize` replaces symbolic sizes by integers.
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

_SIZES = "onnxtrain.sizes"  # key in Graph.meta: the symbolic sizes of the inputs of the user's file
_GENERATED_PREFIXES = ("prepare/", "grad/", "step/")  # of names that are not in the user's file


def symbolic_sizes(graph: ir.Graph) -> list[str]:
    """Return the names of the symbolic sizes of a graph's inputs: ``batch``, or ``x[0]``."""
    names: dict[str, None] = {}
    for x in graph.inputs:
        for axis, d in enumerate(x.shape or ()):
            if not isinstance(d, int):
                names[d.value or f"{x.name}[{axis}]"] = None
    return list(names)


def record_input_sizes(root: ir.Graph) -> None:
    """Record the symbolic sizes of a file in its graph and all subgraphs, for error messages."""
    root.meta[_SIZES] = sizes = tuple(symbolic_sizes(root))
    for node in root.all_nodes():
        for body in subgraphs_of(node):
            body.meta[_SIZES] = sizes


def unknown_rank_message(x: ir.Value) -> str:
    """Return an error message for a value of unknown rank: the node that lost it, and a hint."""
    origin = _first_unknown_rank(x)
    node = origin.producer()
    lines = [f"the rank of value {_name_in_file(origin)!r} is unknown"]
    if origin is not x and not _is_generated(x):
        lines[0] += f", and therefore the rank of {x.name!r}"
    if node is not None:
        lines.append(f"  node {node.name!r}: {_unknown_rank_reason(node)}")
    graph = node.graph if node is not None else origin.graph
    inputs = graph.inputs if isinstance(graph, ir.Graph) else ()
    sizes = graph.meta.get(_SIZES, ()) if isinstance(graph, ir.Graph) else ()
    if node is not None:  # only the sizes that it reads, if all of them have names in the file
        read = [d for v in node.inputs if v is not None for d in S.dims_of(v) or ()]
        symbols = {s for d in read for s in D.symbols(d)}
        if symbols <= {D.symbol(name) for name in sizes} and None not in read:
            sizes = [name for name in sizes if D.symbol(name) in symbols] or sizes
    if sizes:
        example = ", ".join(f"{name!r}: 1" for name in sizes[:4])
        lines.append(f"hint: fix the sizes that it depends on, for example dims={{{example}}}")
    elif all(v.shape is not None for v in inputs):
        lines.append("hint: train only parameters that are used after it, with `train=`")
    else:
        lines.append("hint: declare the shapes of the model's inputs; symbolic sizes are enough")
    return "\n".join(lines)


def _first_unknown_rank(x: ir.Value) -> ir.Value:
    """Return the earliest value of unknown rank that ``x`` depends on."""
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
    """Return the name of a value, or of the nearest value before it that is in the user's file."""
    while _is_generated(x):
        node = x.producer()
        before = next((v for v in node.inputs if v is not None), None) if node else None
        if before is None:
            break
        x = before
    return x.name or ""


def _unknown_rank_reason(node: ir.Node) -> str:
    if node.op_type == "If":
        return "the branches of If return different ranks"
    if node.op_type == "Squeeze" and len(node.inputs) < 2:
        return "Squeeze without axes removes every axis of size 1"
    if node.op_type == "Reshape":
        return "the shape input of Reshape is computed"
    return f"the output rank of {node.op_type} cannot be inferred"


_MAX_DEPTH = 64  # length of the chain of readers to follow
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
    """Return the rank that some reader of a value needs to run; ``None`` if readers accept any.

    Args:
        value: the value of unknown rank.
        declared: ranks that the file declares for outputs of the graph.
    """
    return _required(value, declared, _MAX_DEPTH)


def _required(value: ir.Value, declared: dict[ir.Value, int], depth: int) -> int | None:
    if value in declared:
        return declared[value]
    if depth == 0:
        return None
    graph = value.graph
    for node, i in value.uses():
        if node.graph is not graph:
            continue  # a body may never run
        rank = _rank_by_operator(node, i)
        if rank is None:
            rank = _rank_from_output(node, i, lambda y: _required(y, declared, depth - 1))
        if rank is not None:
            return rank
    return None


def _rank_by_operator(node: ir.Node, i: int) -> int | None:
    """Return the rank that an operator requires of its input ``i``."""
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


def _rank_from_output(
    node: ir.Node, i: int, output_rank: Callable[[ir.Value], int | None]
) -> int | None:
    """Return the rank of a node's input ``i``, derived from the rank its output must have."""
    if is_op(node, "Add", "Sub", "Mul", "Div") and len(node.inputs) == 2:
        other = node.inputs[1 - i]
        rank = None if other is None or other.shape is None else output_rank(node.outputs[0])
        # The output has the larger rank of the two: it is this input's if the other's is smaller.
        larger = rank is not None and other is not None and rank > len(other.shape or ())
        return rank if larger or rank == 0 else None
    if is_op(node, "Concat"):
        return output_rank(node.outputs[0])
    if i != 0:
        return None
    if is_op(node, *_RANK_PRESERVING):
        return output_rank(node.outputs[0])
    change = _rank_change(node)
    rank = None if change is None else output_rank(node.outputs[0])
    return None if rank is None or change is None else rank - change


def _rank_change(node: ir.Node) -> int | None:
    """Return the number of axes a node adds, ``None`` if it depends on values."""
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
    """Replace symbolic dimensions by integers, in place; return the model.

    Name a size as in the file, or by position: ``"x[0]"`` is the first axis of input ``x``.

    Raises:
        PrepareError: a size is not positive, or no input has such a dimension.
    """
    if not sizes:
        return model
    invalid = [f"{n}={v}" for n, v in sizes.items() if v < 1]
    if invalid:
        raise PrepareError(
            f"sizes in `dims` must be positive: {', '.join(invalid)}\n"
            "hint: leave a size out of `dims` to keep it symbolic"
        )
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
            f"unknown dimension in `dims`: {', '.join(absent)}\n"
            f"hint: the inputs have {', '.join(symbolic_sizes(model.graph)) or 'static sizes only'}"
        )
    graph_values = [*model.graph.inputs, *model.graph.outputs]
    graph_values += [y for node in model.graph.all_nodes() for y in node.outputs]
    for x in graph_values:
        dims = S.dims_of(x)
        if dims is not None:
            S.set_dims(x, [D.substitute(d, values) for d in dims])
    return model


def _fix_input_dim(graph: ir.Graph, position: str, size: int, values: dict[str, Dim]) -> bool:
    """Fix the dimension named ``x[0]``; return whether it exists and is symbolic or equal."""
    name, bracket, rest = position.rpartition("[")
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
