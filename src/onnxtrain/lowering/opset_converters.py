"""Convert nodes to the form that an older opset has for them.

A converter is registered for an operator and the first opset that no longer needs it. It changes a
:class:`Draft`, not the graph, or raises :class:`NotConvertibleError`. Converters of one operator
run from the newest to the oldest, so each starts from the form of the next opset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.expand.images import constant_scales
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard, subgraphs_of


class NotConvertibleError(Exception):
    """A node that an opset cannot express; the message is the reason."""


Operand = ir.Value | np.ndarray | None
"""An input of a draft: a value, a constant to create, or ``None``."""


@dataclass
class Draft:
    """Operator, inputs and attributes of a node on its way to an older opset."""

    op_type: str
    inputs: list[Operand]
    attributes: dict[str, ir.Attr]
    node: ir.Node
    opset: int
    """The opset of ``node``."""

    def input(self, i: int) -> Operand:
        """Return an input, ``None`` if it is omitted."""
        return self.inputs[i] if i < len(self.inputs) else None

    def constant(self, i: int, what: str) -> np.ndarray | None:
        """Return a constant input, ``None`` if it is omitted; raise if it is not constant."""
        x = self.input(i)
        if x is None or isinstance(x, np.ndarray):
            return x
        array = S.constant_of(x)
        if array is None:
            elements = S.symbolic_of(x)
            if elements is None or not all(isinstance(e, int) for e in elements):
                raise NotConvertibleError(
                    f"{what} of {self.op_type} must be constant in older opsets"
                )
            array = np.asarray(elements, np.int64).reshape(() if S.dims_of(x) == () else (-1,))
        return array

    def get(self, name: str) -> Any:
        """Return an attribute or its default."""
        if name in self.attributes:
            return S.python_value(self.attributes[name])
        return default_of(self.node.op_type, self.opset, name)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self.attributes |= {a.name: a for a in ir.convenience.convert_attributes({name: value})}

    def drop(self, name: str, *defaults: Any) -> None:
        """Remove an attribute; raise if its value is not one of ``defaults``."""
        value = self.get(name)
        if value is not None and value not in defaults:
            raise NotConvertibleError(f"older opsets have no {self.op_type} with {name}={value!r}")
        self.attributes.pop(name, None)

    def keep_inputs(self, count: int) -> None:
        """Drop all inputs after the first ``count``."""
        del self.inputs[count:]

    def has_rank(self) -> bool:
        """Return whether the rank of the first input is known."""
        x = self.inputs[0]
        return isinstance(x, ir.Value) and x.shape is not None

    def rank(self) -> int:
        """Return the rank of the first input."""
        x = self.inputs[0]
        if not isinstance(x, ir.Value) or x.shape is None:
            raise NotConvertibleError(f"the rank of the input of {self.op_type} is unknown")
        return len(x.shape)

    def dims(self, i: int = 0) -> tuple[Any, ...]:
        """Return the sizes of an input."""
        x = self.inputs[i]
        dims = S.dims_of(x) if isinstance(x, ir.Value) else None
        if dims is None:
            raise NotConvertibleError(f"the rank of an input of {self.op_type} is unknown")
        return dims


def default_of(op_type: str, opset: int, name: str) -> Any:
    """Return the default of an attribute at an opset, ``None`` if there is none."""
    schema = S.schema_of(op_type, opset)
    formal = None if schema is None else schema.attributes.get(name)
    if formal is None or not formal.default_value.type:
        return None
    return S.python_value(ir.serde.deserialize_attribute(formal.default_value))


def finish_draft(draft: Draft, opset: int) -> None:
    """Adapt the attributes of a draft to the schema of an opset, in place, and check the rest.

    Raises:
        NotConvertibleError: if the schema does not allow the draft.
    """
    schema = S.schema_of(draft.op_type, opset)
    if schema is None or schema.deprecated:
        raise NotConvertibleError(f"no {draft.op_type} in opset {opset}")
    same_op = draft.op_type == draft.node.op_type
    for name in [n for n in draft.attributes if n not in schema.attributes]:
        value = S.python_value(draft.attributes[name])
        default = default_of(draft.node.op_type, draft.opset, name) if same_op else None
        if value != default:
            raise NotConvertibleError(f"{draft.op_type} has no attribute {name} in opset {opset}")
        del draft.attributes[name]
    for name, formal in schema.attributes.items():
        if name in draft.attributes:
            continue
        old = default_of(draft.op_type, opset, name)
        new = default_of(draft.op_type, draft.opset, name) if same_op else None
        if new is not None and new != old:
            draft.set(name, new)
        elif formal.required:
            raise NotConvertibleError(f"{draft.op_type} needs attribute {name} in opset {opset}")
    while draft.inputs and draft.inputs[-1] is None:
        draft.inputs.pop()
    count = len(draft.inputs)
    if not schema.min_input <= count <= schema.max_input:
        raise NotConvertibleError(f"{draft.op_type} with {count} inputs is not in opset {opset}")
    if len(draft.node.outputs) > schema.max_output:
        used = [y for y in draft.node.outputs[schema.max_output :] if y.uses()]
        if used:
            raise NotConvertibleError(
                f"{draft.op_type} has no output {used[0].name!r} in opset {opset}"
            )
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
                raise NotConvertibleError(
                    f"{draft.op_type} of {x.type.dtype.name.lower()} is not in opset {opset}"
                )
            if slot.type_str in allowed and (
                slot.option != onnx.defs.OpSchema.FormalParameterOption.Variadic
                or slot.is_homogeneous
            ):
                first = bound.setdefault(slot.type_str, x.type.dtype)
                if first != x.type.dtype:
                    raise NotConvertibleError(
                        f"{draft.op_type} of {first.name.lower()} and {x.type.dtype.name.lower()} "
                        f"is not in opset {opset}"
                    )


Converter = Callable[[Draft], None]
_CONVERTERS: dict[str, list[tuple[int, Converter]]] = {}


def converter(*op_types: str, below: int) -> Callable[[Converter], Converter]:
    """Register the converter of operators for opsets below a number."""

    def register(function: Converter) -> Converter:
        for op_type in op_types:
            _CONVERTERS.setdefault(op_type, []).append((below, function))
            _CONVERTERS[op_type].sort(key=lambda entry: -entry[0])
        return function

    return register


def convert_node(node: ir.Node, opset: int, working: int) -> Draft:
    """Return a node in the form that an opset has for it.

    Raises:
        NotConvertibleError: if the opset cannot express it.
    """
    drafted = Draft(node.op_type, list(node.inputs), dict(node.attributes), node, working)
    if not is_standard(node):
        raise NotConvertibleError(f"an operator of domain {node.domain!r}")
    _positive_axes(drafted, needed=opset < 11)
    for below, function in _CONVERTERS.get(node.op_type, ()):
        if opset < below:
            function(drafted)
    finish_draft(drafted, opset)
    return drafted


_AXIS = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "Concat",
        "CumSum",
        "Flatten",
        "Gather",
        "GatherElements",
        "Hardmax",
        "LayerNormalization",
        "LogSoftmax",
        "LpNormalization",
        "OneHot",
        "ScatterElements",
        "Softmax",
        "Split",
        "TopK",
    ]
)


def _positive_axes(d: Draft, *, needed: bool) -> None:
    """Make the axis non-negative: before opset 11 it cannot be negative."""
    if d.op_type not in _AXIS or not (needed or d.has_rank()):
        return
    axis = d.get("axis")
    if axis is not None and axis < 0:
        d.set("axis", axis + d.rank() + (d.op_type == "OneHot"))  # OneHot adds an axis


def convert_operators(model: ir.Model, opset: int, prefix: str = "lower/") -> None:
    """Convert every node of the standard domain to an opset, in place, and set the opset import.

    Args:
        model: a model of the working opset.
        opset: opset of the result, not newer.
        prefix: prefix of the names of new constants.

    Raises:
        NotConvertibleError: if the opset cannot express a node.
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
        new = convert_node(node, opset, working)
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
            y.meta.update(old.meta)  # symbolic sizes
            if old.name:
                old.name = f"{old.name}.old"
            old.replace_all_uses_with(y, replace_graph_outputs=True)
        graph.remove(node, safe=True)


class _Constants:
    """Initializers for the constants of converted nodes; equal arrays share one."""

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


@converter("Resize", below=18)
def _resize_18(d: Draft) -> None:
    """Remove ``antialias``, ``axes`` and ``keep_aspect_ratio_policy``."""
    d.drop("antialias", 0)
    d.drop("keep_aspect_ratio_policy", "stretch")
    if d.get("coordinate_transformation_mode") == "half_pixel_symmetric":
        raise NotConvertibleError("older opsets have no Resize with half_pixel_symmetric")
    axes = d.get("axes")
    d.attributes.pop("axes", None)
    if axes is None:
        return
    rank, dims = d.rank(), d.dims()
    axes = [a % rank for a in axes]
    if d.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise NotConvertibleError("older opsets have no Resize of a region of some axes")
    for i, kind, filler in ((2, np.float32, 1.0), (3, np.int64, None)):
        given = d.constant(i, "the size")
        if given is None or not given.size:
            continue
        full = [filler if filler is not None else dims[a] for a in range(rank)]
        for a, value in zip(axes, given, strict=True):
            full[a] = value
        if any(isinstance(v, str) or v is None for v in full):
            raise NotConvertibleError(
                "older opsets have no Resize of some axes of a symbolic shape"
            )
        d.inputs[i] = np.asarray(full, kind)


@converter("Resize", below=13)
def _resize_13(d: Draft) -> None:
    """Add empty ``roi`` and ``scales``, which are not optional."""
    d.inputs += [None] * (3 - len(d.inputs))
    if d.input(1) is None:
        d.inputs[1] = np.zeros(0, np.float32)
    if d.input(2) is None:
        d.inputs[2] = np.zeros(0, np.float32)


@converter("Resize", below=11)
def _resize_10(d: Draft) -> None:
    """Keep upsampling by nearest or linear with coordinates ``floor(i / scale)``."""
    scales = constant_scales(d.node)
    mode, place = d.get("mode"), d.get("coordinate_transformation_mode")
    whole = scales is not None and all(float(s).is_integer() and s >= 1 for s in scales)
    if scales is None or any(s < 1 for s in scales):
        raise NotConvertibleError("older opsets have no Resize to computed or smaller sizes")
    if mode == "nearest":
        rounding = d.get("nearest_mode")
        same = place == "asymmetric" and rounding == "floor"
        # For integer scales these read the same elements.
        same = same or (
            whole
            and place in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
            and rounding in ("round_prefer_floor", "round_prefer_ceil")
        )
        if not same or not whole:
            raise NotConvertibleError(
                f"older opsets have no nearest Resize with {place}, {rounding}"
            )
    elif mode != "linear" or place != "asymmetric" or d.rank() not in (2, 4):
        raise NotConvertibleError(f"older opsets have no {mode} Resize with {place}")
    d.attributes = {"mode": ir.AttrString("mode", mode)}
    d.inputs[1:] = [np.asarray(scales, np.float32)]


@converter("Resize", below=10)
def _upsample_9(d: Draft) -> None:
    d.op_type = "Upsample"


@converter("Resize", below=9)
def _upsample_7(d: Draft) -> None:
    scales = d.inputs[1]
    assert isinstance(scales, np.ndarray)
    d.attributes["scales"] = ir.AttrFloat32s("scales", [float(s) for s in scales])
    d.keep_inputs(1)


def _axes(d: Draft, i: int) -> list[int] | None:
    array = d.constant(i, "axes")
    return None if array is None else [int(a) if a >= 0 else int(a) + d.rank() for a in array.flat]


_REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]


@converter(*(f"Reduce{r}" for r in _REDUCTIONS), below=18)
@converter("ReduceSum", below=13)
def _reduce(d: Draft) -> None:
    noop = d.get("noop_with_empty_axes")
    d.attributes.pop("noop_with_empty_axes", None)
    axes = _axes(d, 1)
    if not axes and noop:
        raise NotConvertibleError(f"older opsets have no {d.op_type} over no axes")
    if axes or d.has_rank():  # by default it reduces all axes
        d.set("axes", axes or list(range(d.rank())))
    d.keep_inputs(1)


@converter("Squeeze", below=13)
def _squeeze(d: Draft) -> None:
    axes = _axes(d, 1)
    if axes is None:
        axes = [i for i, size in enumerate(d.dims()) if size == 1]
        if not all(isinstance(size, int) for size in d.dims()):
            raise NotConvertibleError("in older opsets Squeeze of symbolic sizes needs axes")
    d.set("axes", axes)
    d.keep_inputs(1)


@converter("Unsqueeze", below=13)
def _unsqueeze(d: Draft) -> None:
    array = d.constant(1, "axes")
    assert array is not None
    rank = d.rank() + array.size
    d.set("axes", sorted(int(a) % rank for a in array.reshape(-1)))
    d.keep_inputs(1)


@converter("Split", below=18)
def _split_parts(d: Draft) -> None:
    parts = d.get("num_outputs")
    d.attributes.pop("num_outputs", None)
    if parts is None:
        return
    size = d.dims()[d.get("axis")]
    if not isinstance(size, int):
        raise NotConvertibleError(
            "older opsets have no num_outputs of Split, and the size is symbolic"
        )
    each = -(-size // parts)
    rest = [min(each, size - i * each) for i in range(parts)]
    d.inputs[1:] = [np.asarray(rest, np.int64)]


@converter("Split", below=13)
def _split(d: Draft) -> None:
    sizes = d.constant(1, "the sizes")
    if sizes is not None:
        d.set("split", [int(s) for s in sizes])
    d.keep_inputs(1)


@converter("Clip", below=11)
def _clip(d: Draft) -> None:
    for i, name in ((1, "min"), (2, "max")):
        bound = d.constant(i, name)
        if bound is not None:
            d.set(name, float(bound.reshape(())))
    d.keep_inputs(1)


@converter("Pad", below=19)
def _pad_mode(d: Draft) -> None:
    if d.get("mode") == "wrap":
        raise NotConvertibleError("older opsets have no Pad with mode wrap")


@converter("Pad", below=18)
def _pad_axes(d: Draft) -> None:
    axes = _axes(d, 3)
    if axes is None:
        return
    pads, rank = d.constant(1, "pads"), d.rank()
    assert pads is not None
    full = np.zeros(2 * rank, np.int64)
    for i, a in enumerate(axes):
        full[a], full[a + rank] = pads[i], pads[i + len(axes)]
    d.inputs[1] = full
    d.keep_inputs(3)


@converter("Pad", below=11)
def _pad(d: Draft) -> None:
    pads, value = d.constant(1, "pads"), d.constant(2, "the filler")
    assert pads is not None
    d.set("pads", [int(p) for p in pads])
    if value is not None:
        d.set("value", float(value.reshape(())))
    d.keep_inputs(1)


@converter("Slice", below=10)
def _slice(d: Draft) -> None:
    starts, ends = d.constant(1, "starts"), d.constant(2, "ends")
    steps = d.constant(4, "steps")
    assert starts is not None
    assert ends is not None
    if steps is not None and any(steps != 1):
        raise NotConvertibleError("older opsets have no Slice with steps")
    axes = _axes(d, 3) or list(range(starts.size))
    d.set("starts", [int(s) for s in starts])
    d.set("ends", [int(e) for e in ends])
    d.set("axes", axes)
    d.keep_inputs(1)


@converter("TopK", below=10)
def _top_k(d: Draft) -> None:
    k = d.constant(1, "k")
    assert k is not None
    d.set("k", int(k.reshape(())))
    d.keep_inputs(1)


@converter("Dropout", below=12)
def _dropout(d: Draft) -> None:
    training = d.constant(2, "training_mode")
    if training is not None and bool(training):
        raise NotConvertibleError("older opsets have no Dropout in training mode")
    if any(y.uses() or y.is_graph_output() for y in d.node.outputs[1:]):
        raise NotConvertibleError("older opsets do not specify the mask of Dropout at inference")
    ratio = d.constant(1, "ratio")
    if ratio is not None:
        d.set("ratio", float(ratio))
    d.attributes.pop("seed", None)
    d.keep_inputs(1)


@converter("BatchNormalization", below=14)
def _batch_normalization(d: Draft) -> None:
    d.drop("training_mode", 0)


@converter("Softmax", "LogSoftmax", "Hardmax", below=13)
def _softmax(d: Draft) -> None:
    behind = d.dims()[d.get("axis") % d.rank() + 1 :]
    if any(size != 1 for size in behind):
        raise NotConvertibleError(f"older opsets have no {d.op_type} along an axis before the last")


@converter("Gemm", below=11)
def _gemm(d: Draft) -> None:
    if d.input(2) is None:
        a = d.inputs[0]
        assert isinstance(a, ir.Value)
        assert a.dtype is not None
        d.inputs[2:] = [np.zeros(1, a.dtype.numpy())]


@converter("Max", "Min", "Sum", "Mean", below=8)
def _same_shapes(d: Draft) -> None:
    first = d.inputs[0]
    for x in d.inputs[1:]:
        if not (isinstance(x, ir.Value) and isinstance(first, ir.Value) and S.same_shape(x, first)):
            raise NotConvertibleError(f"{d.op_type} does not broadcast in older opsets")


@converter("Reshape", below=14)
def _reshape(d: Draft) -> None:
    if not d.get("allowzero"):
        return
    shape = d.input(1)
    elements = S.symbolic_of(shape) if isinstance(shape, ir.Value) else None
    if elements is None or 0 in elements:
        raise NotConvertibleError("older opsets have no Reshape to a size of zero")
    d.attributes.pop("allowzero", None)


@converter("Shape", below=15)
def _shape(d: Draft) -> None:
    start, end = d.get("start"), d.get("end")
    starts = start == 0 or start <= -d.rank()
    if not starts or (end is not None and end < d.rank()):
        raise NotConvertibleError("older opsets have no Shape with start and end")
    d.attributes.pop("start", None)
    d.attributes.pop("end", None)


@converter("Cast", below=24)
def _cast(d: Draft) -> None:
    d.attributes.pop("round_mode", None)  # affects float8e8m0 only


@converter("LSTM", "GRU", "RNN", below=14)
def _recurrent(d: Draft) -> None:
    d.drop("layout", 0)


@converter("ScatterElements", "ScatterND", below=18)
def _scatter(d: Draft) -> None:
    if d.get("reduction") in ("max", "min"):
        raise NotConvertibleError(
            f"older opsets have no {d.op_type} with reduction {d.get('reduction')}"
        )


@converter("ScatterElements", below=11)
def _scatter_elements(d: Draft) -> None:
    d.drop("reduction", "none")
    d.op_type = "Scatter"
    d.attributes = {"axis": ir.AttrInt64("axis", d.get("axis"))}


@converter("GatherND", below=12)
def _gather_nd(d: Draft) -> None:
    d.drop("batch_dims", 0)


@converter("AveragePool", "MaxPool", below=10)
def _pool(d: Draft) -> None:
    d.drop("ceil_mode", 0)
    dilations = d.get("dilations")
    if dilations and set(dilations) != {1}:
        raise NotConvertibleError(f"older opsets have no {d.op_type} with dilations")
    d.attributes.pop("dilations", None)


@converter("AveragePool", below=19)
def _average_pool(d: Draft) -> None:
    dilations = d.get("dilations")
    if dilations and set(dilations) != {1}:
        raise NotConvertibleError("older opsets have no AveragePool with dilations")
    d.attributes.pop("dilations", None)


@converter("DepthToSpace", below=11)
def _depth_to_space(d: Draft) -> None:
    d.drop("mode", "DCR")


@converter("RoiAlign", below=16)
def _roi_align(d: Draft) -> None:
    # The only mode before opset 16, not the default of later versions.
    d.drop("coordinate_transformation_mode", "output_half_pixel")


@converter("GridSample", below=20)
def _grid_sample(d: Draft) -> None:
    names = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}
    if d.rank() != 4:
        raise NotConvertibleError("older opsets have GridSample of 4 dimensions only")
    d.set("mode", names[d.get("mode")])


@converter("DFT", below=20)
def _dft(d: Draft) -> None:
    axis = d.constant(2, "the axis")
    d.set("axis", -2 % d.rank() if axis is None else int(axis) % d.rank())
    d.keep_inputs(2)
