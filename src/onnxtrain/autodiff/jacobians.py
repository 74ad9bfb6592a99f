"""Models that map over an axis, and what follows from it: Jacobians, Hessians and their products.

``vmap`` turns a model into one that runs for each element along an axis of inputs. What depends
on these inputs runs for all elements at once, by :mod:`onnxtrain.autodiff.batching`, or moves into
the body of a Scan if an operator has no batching rule; everything else runs once::

    before:  h = f(w);  y = g(x, h)
    after:   h = f(w);  y = g(stacked x, h), or y = Scan(x) { g(x_i, h) }

A Jacobian is the reverse sweep mapped over the rows of an identity matrix: the forward pass and all
of the backward pass that does not depend on the row run once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.batching import batch_nodes
from onnxtrain.autodiff.gradients import (
    GradientModel,
    Names,
    load_normalized,
    prepare_gradients,
    push_forward,
    select_scalar_output,
)
from onnxtrain.autodiff.selection import match
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node_list
from onnxtrain.graph.io import Source, load, save
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.optimize.pipeline import rewrite_final
from onnxtrain.targets import Target


def vmap(
    model: Source, inputs: Names = None, *, axis: int = 0, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that runs for each element along a new axis of some inputs.

    Operators without a batching rule run one element after another, in a Scan.

    The inputs get an axis of size ``vmap``, and so do the outputs that depend on them. For example,
    ``vmap(grad("loss.onnx"), ["x", "labels"])`` gives the gradient of each example, for inputs of
    shape [examples, 1, ...].

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        inputs: names or glob patterns of the inputs to map over. By default, all.
        axis: position of the new axis in these inputs; outputs have it first.
        target: as in :func:`onnxtrain.vjp`.

    Raises:
        PrepareError: an input does not exist; the message lists near matches.
    """
    prepared = load_normalized(model, target)
    graph = prepared.graph
    known = {x.name or "": x for x in graph.inputs}
    requested = [inputs] if isinstance(inputs, str) else inputs
    mapped = [*known.values()] if requested is None else match(requested, known, "inputs", "input")
    if not mapped:
        raise PrepareError("vmap needs an input to map over\nhint: name one in inputs=")
    op = OpBuilder(graph, "vmap/", target=target)
    stacked: list[ir.Value] = []
    for x in mapped:
        dims = list(op.dims(x))
        position = axis % (len(dims) + 1)
        name, x.name = x.name, op.names.fresh(f"{x.name}.element")
        new = ir.Value(name=name, type=x.type)
        S.set_dims(new, [*dims[:position], "vmap", *dims[position:]])
        graph.inputs[list(graph.inputs).index(x)] = new
        stacked.append(new)
    for i, y in enumerate(list(graph.outputs)):
        if y.is_graph_input() or y in mapped:
            graph.outputs[i] = op.Identity(y)
            graph.outputs[i].name, y.name = y.name, op.names.fresh(f"{y.name}.element")
    _replace_outputs(op, list(zip(stacked, mapped, strict=True)), axis)
    return finalize(rewrite_final(prepared.model, op.target))


def jacobian(
    model: Source, wrt: Names = None, of: str | None = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes Jacobians in addition to its outputs.

    Inputs: those of the model and the parameters in ``wrt`` order. Outputs: those of the model, and
    for each ``wrt`` ``<name>_jacobian``, of the shape of the output followed by that of ``wrt``.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`onnxtrain.vjp`.
        of: the output to differentiate. By default, the only one or the one named ``loss``.
        target: as in :func:`onnxtrain.vjp`.
    """
    work, wrt_values, (y,) = prepare_gradients(model, wrt, of, target, select_scalar_output)
    gradient_model = GradientModel(work, target)
    gradient_model.lift(wrt_values)
    row = gradient_model.input_like(f"{y.name}_row", y)
    gradients = gradient_model.differentiate({y: row}, wrt_values)
    count = len(gradient_model.graph.outputs)
    for x in wrt_values:
        gradient_model.output(f"{x.name}_jacobian", gradients[x], x)
    return _with_rows(gradient_model, [(y, row, list(range(count, count + len(wrt_values))))])


def hessian(
    model: Source, wrt: Names = None, of: str | None = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes second derivatives of a scalar output.

    Outputs: those of the model, and ``<a>_<b>_hessian`` for each pair of ``wrt``, of the shape of
    ``a`` followed by that of ``b``; for a single ``wrt`` ``<name>_hessian``.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`onnxtrain.vjp`.
        of: as in :func:`onnxtrain.grad`.
        target: as in :func:`onnxtrain.vjp`.
    """
    gradient_model, wrt_values, gradients = _gradients(model, wrt, of, target)
    rows = []
    for a, g in zip(wrt_values, gradients, strict=True):
        row = gradient_model.input_like(f"{a.name}_row", a)
        second = gradient_model.differentiate({g: row}, wrt_values)
        first = len(gradient_model.graph.outputs)
        for b in wrt_values:
            pair = a.name if len(wrt_values) == 1 else f"{a.name}_{b.name}"
            gradient_model.output(f"{pair}_hessian", second[b], b)
        rows.append((a, row, list(range(first, first + len(wrt_values)))))
    return _with_rows(gradient_model, rows)


def hvp(
    model: Source, wrt: Names = None, of: str | None = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes the product of the Hessian of a scalar output with a vector.

    Inputs: those of the model, the parameters in ``wrt`` order, and ``<name>_tangent`` for each
    ``wrt``. Outputs: those of the model, then for each ``wrt`` ``<name>_grad``, then for each
    ``wrt`` ``<name>_hvp``. The Hessian itself is never computed.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`onnxtrain.vjp`.
        of: as in :func:`onnxtrain.grad`.
        target: as in :func:`onnxtrain.vjp`.
    """
    gradient_model, wrt_values, gradients = _gradients(model, wrt, of, target)
    tangents = [gradient_model.input_like(f"{x.name}_tangent", x) for x in wrt_values]
    # The gradient of <gradient, tangent>: tangents are the cotangents of the gradients.
    cotangents = dict(zip(gradients, tangents, strict=True))
    products = gradient_model.differentiate(cotangents, wrt_values)
    for x, g in zip(wrt_values, gradients, strict=True):
        gradient_model.output(f"{x.name}_grad", g, x)
    for x in wrt_values:
        gradient_model.output(f"{x.name}_hvp", products[x], x)
    return gradient_model.finish()


def _gradients(
    model: Source, wrt: Names, of: str | None, target: str | Target
) -> tuple[GradientModel, list[ir.Value], list[ir.Value]]:
    """Return a model with the gradients of a scalar output, each a separate value."""
    work, wrt_values, (loss,) = prepare_gradients(model, wrt, of, target, select_scalar_output)
    if S.dims_of(loss) not in ((), (1,)):
        raise UndifferentiableError(
            f"the output must have one element, got {S.describe_value(loss)}\n"
            "hint: reduce it in the model, or use onnxtrain.jacobian"
        )
    gradient_model = GradientModel(work, target)
    gradient_model.lift(wrt_values)
    op = gradient_model.op
    seed = op.const(1.0 if S.dims_of(loss) == () else [1.0], loss.dtype)
    found = gradient_model.differentiate({loss: seed}, wrt_values)
    gradients = [op.Identity(op.zeros_like(x) if g is None else g) for x, g in found.items()]
    for x, g in zip(wrt_values, gradients, strict=True):
        g.type, g.shape = x.type, x.shape
    return gradient_model, wrt_values, gradients


def _with_rows(
    gradient_model: GradientModel, rows: Sequence[tuple[ir.Value, ir.Value, list[int]]]
) -> onnx.ModelProto:
    """Map outputs over the rows of identity matrices; return the checked model.

    Each of ``rows`` is a value, the input that holds one row of its identity matrix, and the
    outputs to map, which have the shape of what the value is differentiated by.
    """
    gradient_model.rewrite()
    op, graph = gradient_model.op, gradient_model.graph
    for y, row, outputs in rows:
        sizes = [op.size(y, i) for i in range(op.rank(y))]
        count = op.ReduceProd(op.vector(sizes), keepdims=1) if sizes else 1
        total = op.static(y)
        if total is not None:
            count = 1
            for size in total:
                count *= size
        assert row.dtype is not None
        eye = op.reshape(op.eye(count, row.dtype), [-1, *sizes])
        values = [graph.outputs[i] for i in outputs]
        stacked = _scan(op, [(eye, row)], values, 0)
        for i, old, new in zip(outputs, values, stacked, strict=True):
            inner = [op.size(old, k) for k in range(op.rank(old))]
            full = op.reshape(new, [*sizes, *inner])
            S.set_dims(full, [*op.dims(y), *op.dims(old)])
            name, old.name = old.name, op.names.fresh(f"{old.name}.row")
            full.name = name
            graph.outputs[i] = full
        graph.inputs.remove(row)
    remove_dead(gradient_model.model)
    return finalize(rewrite_final(gradient_model.model, op.target))


def _replace_outputs(op: OpBuilder, pairs: list[tuple[ir.Value, ir.Value]], axis: int) -> None:
    """Replace the outputs that depend on elements by those of a Scan over the stacked values."""
    graph = op.graph
    reached = _dependents(op, [x for _, x in pairs])
    positions = [i for i, y in enumerate(graph.outputs) if y.producer() in reached]
    values = [graph.outputs[i] for i in positions]
    if not values:
        return
    for i, old, new in zip(positions, values, _scan(op, pairs, values, axis), strict=True):
        name, old.name = old.name, op.names.fresh(f"{old.name}.element")
        new.name = name
        graph.outputs[i] = new
    remove_dead(ir.Model(graph, ir_version=10))


def _dependents(op: OpBuilder, sources: Sequence[ir.Value]) -> set[ir.Node | None]:
    """Return the nodes that depend on ``sources``."""
    values, nodes = set(sources), set[ir.Node | None]()
    for node in op.graph:
        if any(x in values for x in (*node.inputs, *captured(node)) if x is not None):
            nodes.add(node)
            values.update(node.outputs)
    return nodes


def _scan(
    op: OpBuilder, pairs: list[tuple[ir.Value, ir.Value]], results: list[ir.Value], axis: int
) -> list[ir.Value]:
    """Append a Scan that computes ``results`` for each element; return them, stacked.

    ``pairs`` are stacked values, and the values that stand for one element of them.
    """
    dependent = _dependents(op, [x for _, x in pairs])
    nodes = [n for n in op.graph if n in dependent]
    elements = {x: op.move_axis(stacked, axis, 0) for stacked, x in pairs}
    batched = batch_nodes(op, nodes, elements)
    if batched is not None:
        return [_for_all(op, batched, y, next(iter(elements.values()))) for y in results]
    body = op.body([x for _, x in pairs])
    mapping = {x: inner for (_, x), inner in zip(pairs, body.graph.inputs, strict=True)}
    copy_node_list(body, nodes, mapping)
    outputs = [body.Identity(mapping.get(y, y)) for y in results]
    for out, y in zip(outputs, results, strict=True):
        out.type, out.shape = y.type, y.shape
    body.graph.outputs.extend(outputs)
    stacked = op.Scan(
        *(x for x, _ in pairs),
        body=body.graph,
        num_scan_inputs=len(pairs),
        scan_input_axes=[axis] * len(pairs) if axis else None,
        _outputs=len(results),
    )
    values = list(stacked) if isinstance(stacked, tuple) else [stacked]
    first = pairs[0][0]
    size: Dim = op.dims(first)[axis]
    for value, y in zip(values, results, strict=True):
        value.type = y.type
        S.set_dims(value, [size, *op.dims(y)])
    return values


def _for_all(
    op: OpBuilder, batched: dict[ir.Value, ir.Value], y: ir.Value, stacked: ir.Value
) -> ir.Value:
    """Return a result for all elements as a value of its own; results may be equal for them."""
    if y in batched:
        new = op.Identity(batched[y])
    else:
        new = op.Expand(y, op.vector([op.size(stacked, 0), *[1] * op.rank(y)]))
    new.type = y.type
    S.set_dims(new, [op.dims(stacked)[0], *op.dims(y)])
    return new


def save_casadi(
    model: Source, path: str | os.PathLike[str], *, target: str | Target = "cpu"
) -> list[Path]:
    """Write a model and its derivatives under the names that CasADi looks for; return the paths.

    For ``f.onnx``: the model itself; ``adj_f.onnx``, with inputs ``adj_<output>`` and outputs
    ``adj_<input>``; ``fwd_f.onnx``, with ``fwd_<input>`` and ``fwd_<output>``; and
    ``fwd_adj_f.onnx``, the forward derivative of the adjoint, for Hessians. Derivatives are with
    respect to all float inputs, for any number of seeds: CasADi lays seeds of an r-by-c matrix side
    by side, as one matrix of r rows. Tensors of rank 0 and 1 are columns, and so are those of rank
    3 and more, flattened.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        path: of the model to write; the derivatives are written beside it.
        target: as in :func:`onnxtrain.vjp`.
    """
    file = Path(path)
    adjoint = _casadi(model, "adj", target)
    models = {
        "": finalize(load_normalized(model, target).model),
        "adj_": adjoint,
        "fwd_": _casadi(model, "fwd", target),
        "fwd_adj_": _casadi(adjoint, "fwd", target),
    }
    paths = [file.with_name(prefix + file.name) for prefix in models]
    for one, proto in zip(paths, models.values(), strict=True):
        save(proto, one)
    return paths


def _casadi(model: Source, kind: str, target: str | Target) -> onnx.ModelProto:
    """Return the adjoint (``adj``) or the forward derivative (``fwd``) of a model."""
    inputs = [x.name or "" for x in load(model).graph.inputs if S.is_float(x)]
    work, wrt_values, selected = prepare_gradients(model, inputs, None, target)
    gradient_model = GradientModel(work, target)
    op, graph = gradient_model.op, gradient_model.graph
    first = len(graph.outputs)
    seeded, results = (selected, wrt_values) if kind == "adj" else (wrt_values, selected)
    seeds = {x: gradient_model.input_like(f"{kind}_{x.name}.seed", x) for x in seeded}
    if kind == "adj":
        found = gradient_model.differentiate(seeds, wrt_values)
    else:
        found = push_forward(gradient_model, seeds, selected)
    for x in results:
        gradient_model.output(f"{kind}_{x.name}", found[x], x)
    graph.sort()
    gradient_model.rewrite()
    values = list(graph.outputs)[first:]
    packed = {x: _packed_input(op, f"{kind}_{x.name}", f"n{kind}", x) for x in seeded}
    pairs = [(_unpack(op, packed[x], x), seeds[x]) for x in seeded]
    for x, old, new in zip(results, values, _scan(op, pairs, values, 0), strict=True):
        full = _pack(op, new, x)
        name, old.name = old.name, op.names.fresh(f"{old.name}.seed")
        full.name = name
        graph.outputs[list(graph.outputs).index(old)] = full
    for seed in seeds.values():
        graph.inputs.remove(seed)
    remove_dead(gradient_model.model)
    return finalize(rewrite_final(gradient_model.model, op.target))


def _packed_input(op: OpBuilder, name: str, count: str, x: ir.Value) -> ir.Value:
    """Add an input for the seeds of ``x``, side by side."""
    dims = op.dims(x)
    assert x.dtype is not None
    if len(dims) == 2:
        width = count if dims[1] == 1 else f"{count}_x{dims[1]}"
        return op.input(name, x.dtype, [dims[0], width])
    rows = dims[0] if len(dims) == 1 else D.product(dims)
    return op.input(name, x.dtype, [rows, count])


def _unpack(op: OpBuilder, packed: ir.Value, x: ir.Value) -> ir.Value:
    """Return [seeds, *shape of x]."""
    sizes = [op.size(x, i) for i in range(op.rank(x))]
    if len(sizes) == 2:
        parts = op.reshape(packed, [sizes[0], -1, sizes[1]])
        stacked = op.Transpose(parts, perm=[1, 0, 2])
    else:
        stacked = op.reshape(op.Transpose(packed, perm=[1, 0]), [-1, *sizes])
    S.set_dims(stacked, ["seeds", *op.dims(x)])
    return stacked


def _pack(op: OpBuilder, stacked: ir.Value, x: ir.Value) -> ir.Value:
    """Return the results of all seeds side by side."""
    sizes = [op.size(x, i) for i in range(op.rank(x))]
    if len(sizes) == 2:
        return op.reshape(op.Transpose(stacked, perm=[1, 0, 2]), [sizes[0], -1])
    flat = op.Flatten(stacked, axis=1) if sizes else op.Unsqueeze(stacked, [1])
    return op.Transpose(flat, perm=[1, 0])
