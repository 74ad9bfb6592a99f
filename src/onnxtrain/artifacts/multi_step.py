"""Step models that train several batches per call.

WebAssembly copies parameters and state in and out of every call, which dominates the time of a
small step. :func:`multi_step_model` makes the step the body of a Scan: batches are scanned inputs;
parameters, buffers and state are carried from step to step.

In a small model, most nodes belong to the update. :func:`pack_parameters` therefore joins small
parameters and their state into vectors (``optim/vectors.py``), which stay joined inside the Scan.

A build calls :func:`resolve_steps_per_call`, :func:`pack_parameters` and :func:`multi_step_model`,
in this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.artifacts.graphs import BuiltModel, DifferentiatedModel, dtype_from_name
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import Names, OpBuilder, names_in
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.manifest import ModelSpec, StateSpec, TensorSpec
from onnxtrain.optim.vectors import Pack, pack_small_parameters
from onnxtrain.targets import Target, find

_HOIST_MIN_BYTES = 1024  # larger constants move out of the body, so that model files can share them
_LOOP_ROLES = ("parameter", "buffer", "state", "frozen")
_PER_STEP_ROLES = ("lr", "step")
_DECAYING_SLOTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")

# State below this becomes 0 after each call. The moments of dead units decay forever, and
# WebAssembly cannot flush denormal numbers, which slow down arithmetic.
_DENORMAL_THRESHOLD = 1e-35


def resolve_steps_per_call(
    requested: int | None, target: str | Target, accumulate: int, size: int
) -> int:
    """Return the number of steps per call: the requested one or the default of the target.

    Args:
        requested: the option of the user; ``None`` is the default of the target.
        target: target of the step model.
        accumulate: gradient accumulation steps.
        size: bytes of parameters, buffers, state and frozen weights.

    Raises:
        PrepareError: if the number is below 1, or combined with ``accumulate``.
    """
    if requested is None:
        several = find(target).prefers("multi-step")
        small = accumulate == 1 and size <= T.MULTI_STEP_BYTES
        return T.STEPS_PER_CALL if several and small else 1
    if requested < 1:
        raise PrepareError(f"steps_per_call must be at least 1: {requested}")
    if requested > 1 and accumulate > 1:
        raise PrepareError(
            f"steps_per_call={requested} with accumulate={accumulate}: the step model updates "
            "after every batch\nhint: set one of them to 1"
        )
    return requested


def pack_parameters(
    origin: DifferentiatedModel, options: BuildOptions, state: Sequence[StateSpec]
) -> tuple[DifferentiatedModel, list[StateSpec], list[Pack]]:
    """Join small parameters into vectors; return model, state and packs of parameters and state.

    before:  inputs p1, p2                       outputs g1, g2
    after:   input p -> Split -> p1, p2          output Concat(g1, g2)
    """
    packs = _packs(origin, options, state)
    if not packs:
        return origin, list(state), []
    model = origin.model.clone()
    graph = model.graph
    inputs = {x.name or "": x for x in graph.inputs}
    outputs = list(graph.outputs)
    first_gradient = len(outputs) - len(origin.parameters) - len(origin.changing)
    gradients = dict(zip(origin.parameters, outputs[first_gradient:], strict=False))
    removed: set[str] = set()
    first_node = next(iter(graph), None)
    back = OpBuilder(graph, "pack/", target=options.target)
    front = OpBuilder(graph, "pack/", target=options.target, before=first_node, parent=back)
    for pack in packs:
        members = [inputs[n] for n in pack.members]
        members[0].name = front.names.fresh(f"{pack.name}/member")  # frees the name for the vector
        vector = ir.Value(name=pack.name, type=members[0].type, shape=ir.Shape([pack.size]))
        for old, new in zip(members, pack.split(front, vector).values(), strict=True):
            old.replace_all_uses_with(new)
        graph.inputs[list(graph.inputs).index(members[0])] = vector
        gradients[pack.name] = pack.join(back, gradients)
        removed.update(pack.members[1:])
        for n in pack.members[1:]:
            graph.inputs.remove(inputs[n])
    parameters = tuple(n for n in origin.parameters if n not in removed)
    new_buffers = outputs[len(outputs) - len(origin.changing) :]
    graph.outputs.clear()
    graph.outputs.extend(
        [*outputs[:first_gradient], *(gradients[n] for n in parameters), *new_buffers]
    )
    slots = [pack.of_slot(s.slot) for pack in packs for s in state if s.parameter == pack.name]
    packed_shapes = {p.name: (p.size,) for p in slots}
    packed_state = [
        dataclasses.replace(s, shape=packed_shapes.get(s.name, s.shape))
        for s in state
        if s.parameter not in removed
    ]
    packed = dataclasses.replace(origin, model=model, parameters=parameters)
    return packed, packed_state, [*packs, *slots]


def _packs(
    origin: DifferentiatedModel, options: BuildOptions, state: Sequence[StateSpec]
) -> list[Pack]:
    """Return packs of the small float32 parameters that have the same update formula."""
    if options.ema is not None or options.precision.half is not None:
        return []
    shapes = {
        x.name or "": tuple(d for d in x.shape or () if isinstance(d, int))
        for x in origin.model.graph.inputs
        if x.name in origin.parameters and x.dtype == ir.DataType.FLOAT
    }
    # Factored state (Adafactor) has another shape than its parameter and cannot be joined.
    factored = {s.parameter for s in state if s.shape != shapes.get(s.parameter)}
    joinable = {n: shape for n, shape in shapes.items() if n not in factored}
    return pack_small_parameters(
        options.optimizer, joinable, max_elements=T.PACKED_PARAMETER_ELEMENTS
    )


def multi_step_model(
    step: BuiltModel, count: int, plain: ModelSpec, packs: Sequence[Pack]
) -> BuiltModel:
    """Return a model that computes ``count`` consecutive steps.

    Batches get a leading axis of size ``count``; learning rate and step number have one element per
    step; loss, metrics and outputs are stacked. The results equal those of single steps.

    Args:
        step: a single step with packed parameters; its graph becomes the body of the Scan.
        count: number of steps.
        plain: inputs and outputs of a single step without packing.
        packs: parameters and state that are one tensor in ``step``.
    """
    inner, body = step.spec, step.model.graph
    updated = {t.feeds: t for t in inner.outputs if t.feeds is not None}
    carried = [t for t in inner.inputs if t.name in updated]
    scanned = [t for t in inner.inputs if t.name not in updated and t.role not in _LOOP_ROLES]
    stacked = [t for t in inner.outputs if t.feeds is None]

    inputs = tuple(t if t.role in _LOOP_ROLES else _stacked_spec(t, count) for t in plain.inputs)
    outputs = tuple(t if t.feeds is not None else _stacked_spec(t, count) for t in plain.outputs)
    opsets = {**step.model.opset_imports, "": OPSET}
    outer = ir.Graph(
        [_spec_value(t) for t in inputs], [], nodes=[], opset_imports=opsets, name="steps_model"
    )
    outer.meta.update(body.meta)  # the file of large weights, which may move to this graph
    outer_inputs = {x.name or "": x for x in outer.inputs}
    output_names = [*(y.name or "" for y in body.outputs), *(t.name for t in plain.outputs)]
    names = Names({*names_in(body), *outer_inputs, *output_names})
    op = OpBuilder(outer, "steps/")
    op.names.taken |= names.taken
    body_inputs = _take_inputs(body, outer_inputs, {t.name for t in (*carried, *scanned)}, names)
    _hoist_constants(body, outer)
    # Scan expects carried values before scanned inputs and stacked outputs.
    _become_scan_body(
        body,
        [body_inputs[t.name] for t in (*carried, *scanned)],
        [t.name for t in (*(updated[t.name] for t in carried), *stacked)],
        names,
    )

    packs_by_name = {p.name: p for p in packs}
    scan_inputs = _scan_inputs(op, [*carried, *scanned], outer_inputs, packs_by_name)
    results = {t.name: _spec_value(t) for t in outputs}
    updates = {t.feeds: results[t.name] for t in outputs if t.feeds is not None}
    scan_outputs: list[ir.Value] = []
    for t in (*carried, *stacked):
        if t.name in packs_by_name or _can_underflow(t):
            x = body_inputs[t.name]
            name = op.names.fresh("steps/end")
            scan_outputs.append(ir.Value(name=name, type=x.type, shape=x.shape))
        else:
            scan_outputs.append(updates[t.name] if t in carried else results[t.name])
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(scanned))]
    name = names.fresh("steps")
    outer.append(ir.Node("", "Scan", scan_inputs, attributes, outputs=scan_outputs, name=name))
    for name, value in _unpack_scan_outputs(op, carried, scan_outputs, packs_by_name):
        output = next(t.name for t in outputs if t.feeds == name)
        results[output] = _with_name_of(value, updates[name])
    outer.outputs.extend(results[t.name] for t in outputs)
    model = ir.Model(outer, ir_version=IR_VERSION)
    file = plain.file.removesuffix(".onnx") + f".x{count}.onnx"
    spec = dataclasses.replace(
        plain, file=file, steps_per_call=count, inputs=inputs, outputs=outputs
    )
    return BuiltModel(model, spec)


def _stacked_spec(t: TensorSpec, count: int) -> TensorSpec:
    shape = () if t.role in _PER_STEP_ROLES else t.shape
    return dataclasses.replace(t, shape=(count, *shape))


def _spec_value(t: TensorSpec) -> ir.Value:
    shape = ir.Shape([None if d == "?" else d for d in t.shape])
    return ir.Value(name=t.name, type=ir.TensorType(dtype_from_name(t.dtype)), shape=shape)


def _take_inputs(
    body: ir.Graph, outer_inputs: dict[str, ir.Value], per_step: set[str], names: Names
) -> dict[str, ir.Value]:
    """Rename inputs that change from step to step; read the others from the outer graph."""
    body_inputs = {x.name or "": x for x in body.inputs}
    for name, x in body_inputs.items():
        if name in per_step:
            x.name = names.fresh(f"{name}/each")
        else:
            x.replace_all_uses_with(outer_inputs[name])
    return body_inputs


def _hoist_constants(body: ir.Graph, outer: ir.Graph) -> None:
    """Move large initializers of the body to the outer graph, in place."""
    for name, x in list(body.initializers.items()):
        if x.const_value is not None and x.const_value.nbytes >= _HOIST_MIN_BYTES:
            del body.initializers[name]
            outer.register_initializer(x)


def _become_scan_body(
    body: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[str], names: Names
) -> None:
    """Turn the graph of a step into the body of a Scan with these inputs and outputs."""
    outputs_by_name = {y.name or "": y for y in body.outputs}
    body.inputs.clear()
    body.inputs.extend(inputs)
    body.outputs.clear()
    body.outputs.extend(outputs_by_name[name] for name in outputs)
    body.name = "step"
    for y in body.outputs:
        y.name = names.fresh(f"{y.name}/each")


def _scan_inputs(
    op: OpBuilder,
    tensors: Sequence[TensorSpec],
    outer_inputs: Mapping[str, ir.Value],
    packs: Mapping[str, Pack],
) -> list[ir.Value]:
    """Return the inputs of the Scan, packed as the body expects them."""
    values: list[ir.Value] = []
    for t in tensors:
        if t.name in packs:
            values.append(packs[t.name].join(op, outer_inputs))
        else:
            x = outer_inputs[t.name]
            values.append(op.Unsqueeze(x, op.const([1])) if t.role in _PER_STEP_ROLES else x)
    return values


def _unpack_scan_outputs(
    op: OpBuilder,
    carried: Sequence[TensorSpec],
    scan_outputs: Sequence[ir.Value],
    packs: Mapping[str, Pack],
) -> Iterator[tuple[str, ir.Value]]:
    """Yield (name, final value) of carried tensors that are packed or may contain denormals."""
    for t, y in zip(carried, scan_outputs, strict=False):  # stacked outputs follow
        value = op.Shrink(y, lambd=_DENORMAL_THRESHOLD, bias=0.0) if _can_underflow(t) else y
        if t.name in packs:
            yield from packs[t.name].split(op, value).items()
        elif _can_underflow(t):
            yield t.name, value


def _can_underflow(t: TensorSpec) -> bool:
    """Return whether repeated decay may make elements denormal."""
    return t.role == "state" and t.dtype == "float32" and t.name.endswith(_DECAYING_SLOTS)


def _with_name_of(value: ir.Value, replaced: ir.Value) -> ir.Value:
    """Give a value the name, type and shape of the one it replaces, which loses its name."""
    name, replaced.name = replaced.name, None
    value.name, value.type, value.shape = name, replaced.type, replaced.shape
    return value
