"""The op-case table: the definition of a case, how its inputs are drawn, and its ONNX model.

To test a gradient rule, add two lines to ``CASES`` in ``tests/cases/<family>.py`` (a new file is
found automatically): the plain case and the awkward one (broadcast, negative axis, omitted input)::

    OpCase("Erf", (f(2, 3),), torch=torch.erf),
    OpCase("Elu", (f(4, 5),), {"alpha": 0.5}, torch=lambda x: F.elu(x, 0.5), id="alpha"),

``make rule OP=Erf`` then asks all checks of ``tests/test_op_cases.py`` about them.

Draws, one per input of the node (``None`` is an omitted optional input):
    f(2, 3)  positive(4)  away_from_zero(3)  distinct(3, 4)  between(-0.9, 0.9, 5)
    at([0.0, 1.0])                            floats, differentiated
    fixed(f(3))                               a float input that gets no gradient
    ints([0, 2, -1])  bools([True, False])    run-time inputs without gradient
    const([1, 2])                             an initializer: axes, shapes, pads, scales
    const(f(8, 4))                            a drawn initializer

The torch oracle is called with the node's inputs in order: run-time inputs and float constants as
tensors (float64), integer constants as Python ints or lists, omitted ones as None. It returns one
tensor per graph output (a tuple if several; None for an output that is not to be compared).
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

CHECKS = ("finite", "oracle", "dynamic", "second", "standard", "rebuild", "closed", "targets")
FORWARD = ("reference", "torch", "onnxruntime", "vjp")


@dataclass(frozen=True, eq=False)
class Draw:
    """How one input is made; floats are rounded to float32, so both precisions see the same."""

    make: Callable[[np.random.Generator], np.ndarray]
    kind: str = "wrt"  # wrt: differentiated; fixed: a run-time input; const: an initializer


def _floats(make: Callable[[np.random.Generator], Any]) -> Draw:
    return Draw(lambda rng: np.asarray(make(rng), np.float32).astype(np.float64))


def f(*shape: int) -> Draw:
    """Standard normal floats."""
    return _floats(lambda rng: rng.standard_normal(shape))


def between(low: float, high: float, *shape: int) -> Draw:
    """Uniform floats."""
    return _floats(lambda rng: rng.uniform(low, high, shape))


def positive(*shape: int) -> Draw:
    """Floats in [0.5, 2]."""
    return between(0.5, 2.0, *shape)


def away_from_zero(*shape: int) -> Draw:
    """Floats of either sign with magnitude in [0.3, 1.5]."""
    return _floats(lambda rng: rng.choice([-1.0, 1.0], shape) * rng.uniform(0.3, 1.5, shape))


def distinct(*shape: int) -> Draw:
    """Floats in [-2, 2], none near zero, any two at least 3 / size apart: no ties in Max, TopK."""
    size = int(np.prod(shape))
    grid = np.linspace(-2.0, 2.0, size + size % 2)  # an even count straddles zero
    return _floats(lambda rng: rng.permutation(grid)[:size].reshape(shape))


def at(values: Any) -> Draw:
    """The given floats, differentiated: for what a rule says at a kink."""
    return _floats(lambda rng: values)


def ints(values: Any, dtype: Any = np.int64) -> Draw:
    """The given integers as a run-time input."""
    return Draw(lambda rng: np.asarray(values, dtype), "fixed")


def bools(values: Any) -> Draw:
    """The given booleans as a run-time input."""
    return Draw(lambda rng: np.asarray(values, np.bool_), "fixed")


def fixed(draw: Draw | Any) -> Draw:
    """The same values as a run-time input that is not differentiated."""
    return dataclasses.replace(_as_draw(draw), kind="fixed")


def const(draw: Draw | Any, dtype: Any = None) -> Draw:
    """The same values as an initializer."""
    return dataclasses.replace(_as_draw(draw, dtype), kind="const")


def _as_draw(values: Draw | Any, dtype: Any = None) -> Draw:
    if isinstance(values, Draw):
        return values
    array = np.asarray(values, dtype)
    if array.size == 0 and dtype is None:
        array = array.astype(np.int64)  # an empty list is an empty axes, shape or pads
    return _floats(lambda rng: array) if array.dtype.kind == "f" else Draw(lambda rng: array)


@dataclass(frozen=True, eq=False, repr=False)
class OpCase:
    """One operator, one way to use it. Every check of test_op_cases.py is asked about it."""

    op: str
    inputs: tuple[Draw | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    torch: Callable[..., Any] | None = None
    """The oracle; without one, the float64 reference evaluator and finite differences judge."""
    order: int = 2
    """1 leaves out the second derivative."""
    tol: float = 1e-4
    """Largest error of float32 on onnxruntime, relative to the largest entry of the gradient."""
    xfail: str = ""
    """``"check[,check]: reason"``; the checks are those of CHECKS, or ``all``."""
    id: str = ""
    outputs: int | Sequence[str] = 1
    """How many, or their names: "" omits an optional output, "_..." is computed but unused."""
    opset: int = 21
    model: str | Callable[[int], onnx.ModelProto | ir.Model] | None = None
    """Instead of a single node: the text of an ONNX graph, or a function of the element type
    (TensorProto.FLOAT or DOUBLE). Its graph inputs are ``inputs``, without const and None. In text
    the word ``float`` becomes ``double`` for the float64 checks."""
    forward: str = "reference"
    """Who computes the function for finite differences: onnx's float64 "reference"; where that is
    wrong or absent "torch" (the oracle, float64) or "onnxruntime" (float32, loose); "vjp": the
    forward part of the gradient model itself, for operators that prepare rewrites (randomness)."""
    dynamic: str = "all"
    """``"batch: reason"`` or ``"none: reason"`` where the gradient needs static dimensions."""

    def __post_init__(self) -> None:
        for text, heads in ((self.dynamic, ("batch", "none")), (self.xfail, (*CHECKS, "all"))):
            if text in ("", "all"):
                continue
            head, _, reason = text.partition(":")
            unknown = set(re.split(r"\s*,\s*", head)) - set(heads)
            if unknown or not reason.strip():
                raise ValueError(f"{self.op}: {text!r} is not '<{'|'.join(heads)}>: reason'")
        if self.forward not in FORWARD:
            raise ValueError(f"{self.op}: forward={self.forward!r} is not one of {FORWARD}")
        if self.forward == "torch" and self.torch is None:
            raise ValueError(f"{self.op}: forward='torch' needs a torch oracle")
        if self.model and any(d is None or d.kind == "const" for d in self.inputs):
            raise ValueError(f"{self.op}: the inputs of a model= case are run-time inputs")
        if not any(d is not None and d.kind == "wrt" for d in self.inputs):
            raise ValueError(f"{self.op}: no input to differentiate")

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """``Op-id``, the test id."""
        return f"{self.op}-{self.id or 'plain'}"

    @property
    def wrt(self) -> list[str]:
        """Names of the differentiated inputs."""
        return [n for n, d in self.runtime.items() if d.kind == "wrt"]

    @property
    def runtime(self) -> dict[str, Draw]:
        """The run-time inputs by their names in the model."""
        named = {f"x{i}": d for i, d in enumerate(self.inputs) if d is not None}
        return {n: d for n, d in named.items() if d.kind != "const"}

    def rng(self, purpose: str = "") -> np.random.Generator:
        """A generator that depends on the case and the purpose only."""
        return np.random.default_rng(zlib.crc32(f"{self.name} {purpose}".encode()))

    def values(self) -> list[np.ndarray | None]:
        """One array per input, floats in float64."""
        rng = self.rng("inputs")
        return [None if d is None else d.make(rng) for d in self.inputs]

    def build(self, double: bool = False, dynamic: str = "") -> onnx.ModelProto:
        """The model of this case; ``dynamic`` is "" (static), "batch" or "all"."""
        proto = _from_model(self, double) if self.model else _from_node(self, double)
        return _with_symbols(proto, dynamic) if dynamic else proto


def ir_version(opset: int) -> int:
    """The oldest IR version that goes with an opset."""
    return 10 if opset <= 22 else {23: 11, 24: 12, 25: 12}.get(opset, 13)


def _from_node(case: OpCase, double: bool) -> onnx.ModelProto:
    schema = onnx.defs.get_schema(case.op, case.opset)
    inputs: list[ir.Value | None] = []
    graph_inputs, initializers = [], []
    for i, (draw, array) in enumerate(zip(case.inputs, case.values(), strict=True)):
        if draw is None or array is None:
            inputs.append(None)
            continue
        dtype = ir.DataType.from_numpy(array.dtype)
        if array.dtype.kind == "f":
            wide = double and _allows_double(schema, i)
            dtype = ir.DataType.DOUBLE if wide else ir.DataType.FLOAT
        value = ir.Value(name=f"x{i}", shape=ir.Shape(array.shape), type=ir.TensorType(dtype))
        inputs.append(value)
        if draw.kind == "const":
            value.const_value = ir.tensor(array.astype(dtype.numpy()), name=value.name)
            initializers.append(value)
        else:
            graph_inputs.append(value)
    names = case.outputs
    if isinstance(names, int):
        names = [f"y{i}" for i in range(names)]
    outputs = [ir.Value(name=n) for n in names]
    node = ir.Node("", case.op, inputs, _attributes(schema, case.attrs), outputs=outputs)
    node.name = case.op
    graph = ir.Graph(
        graph_inputs,
        [v for v, n in zip(outputs, names, strict=True) if n and not n.startswith("_")],
        nodes=[node],
        initializers=initializers,
        opset_imports={"": case.opset},
        name="case",
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=ir_version(case.opset)))
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


def _from_model(case: OpCase, double: bool) -> onnx.ModelProto:
    assert case.model is not None
    if isinstance(case.model, str):
        text = re.sub(r"\bfloat\b", "double", case.model) if double else case.model
        version = ir_version(case.opset)
        header = f'<ir_version: {version}, opset_import: ["" : {case.opset}]>\n'
        proto = onnx.parser.parse_model(header + text)
    else:
        built = case.model(onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT)
        proto = ir.to_proto(built) if isinstance(built, ir.Model) else built
    if len(proto.graph.input) != len(case.inputs):
        raise ValueError(f"{case.name}: the model has {len(proto.graph.input)} inputs")
    renamed = {v.name: f"x{i}" for i, v in enumerate(proto.graph.input)}
    model = ir.from_proto(proto)
    for value in model.graph.inputs:
        value.name = renamed[value.name or ""]
    proto = ir.to_proto(model)
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


def _attributes(schema: onnx.defs.OpSchema, attrs: Mapping[str, Any]) -> list[ir.Attr]:
    """Attributes with the types of the schema, so that ``alpha=1`` is a float where it must be."""
    kinds = onnx.defs.OpSchema.AttrType
    cast = {
        kinds.FLOAT: float,
        kinds.FLOATS: lambda v: [float(x) for x in v],
        kinds.INT: int,
        kinds.INTS: lambda v: [int(x) for x in v],
    }
    made = []
    for name, value in attrs.items():
        kind = schema.attributes[name].type
        value = cast.get(kind, lambda v: v)(value)
        if kind == kinds.TENSOR and not isinstance(value, ir.TensorProtocol):
            value = ir.tensor(np.asarray(value))
        made.append(ir.Attr(name, ir.AttributeType(kind.value), value))
    return made


def _allows_double(schema: onnx.defs.OpSchema, index: int) -> bool:
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]  # the last one may be variadic
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return "tensor(double)" in allowed.get(formal.type_str, [formal.type_str])


def _with_symbols(proto: onnx.ModelProto, dynamic: str) -> onnx.ModelProto:
    """The same model with symbolic dims: every input dim, or only the first input's first axis."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for i, value in enumerate(proto.graph.input[: 1 if dynamic == "batch" else None]):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dynamic == "all" or axis == 0:
                dim.dim_param = f"d{i}_{axis}"
    ranks = [len(v.type.tensor_type.shape.dim) for v in proto.graph.output]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    for i, (value, rank) in enumerate(zip(proto.graph.output, ranks, strict=True)):
        if not value.type.tensor_type.HasField("shape"):
            for axis in range(rank):
                value.type.tensor_type.shape.dim.add().dim_param = f"o{i}_{axis}"
    return proto
