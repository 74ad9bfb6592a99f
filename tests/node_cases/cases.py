"""ONNX's backend node cases with float inputs and float outputs, as plain tensor models.

The cases are drawn by onnx with numpy's global generator, so it is seeded before they are made: the
same onnx gives the same cases. Sequences and optionals at the borders are taken apart here, so that
every runtime input and output of a case is a tensor.
"""

import re
import warnings
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.importer.opset import NEWEST_IR, NEWEST_OPSET
from tests.node_cases.borders import tensor_borders

FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)
_TWIN = re.compile(r"_expanded(_function)?(_ver\d+)?$")


def base_name(name: str) -> str:
    """The name of the case whose function body a case is, or its own name."""
    return _TWIN.sub("", name)


@dataclass(frozen=True)
class Case:
    """One node test: a model, its inputs, the outputs onnx expects, and what it is about."""

    name: str
    op: str
    model: bytes
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    rtol: float = 1e-3
    atol: float = 1e-7
    unusable: str = ""
    discrete: dict[str, str] = field(default_factory=dict)
    standard_says_no: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())

    @property
    def base(self) -> str:
        """The name of the case whose body this is, or its own name."""
        return base_name(self.name)

    @property
    def is_twin(self) -> bool:
        """Whether this is the function body of another case."""
        return self.base != self.name

    @property
    def elements(self) -> int:
        """How many numbers go in."""
        return sum(array.size for array in self.inputs.values())

    def proto(self) -> onnx.ModelProto:
        """The model, as a fresh copy."""
        return onnx.ModelProto.FromString(self.model)


def elem_type(value: onnx.ValueInfoProto) -> int:
    """The element type of a tensor, a sequence or an optional."""
    kind = value.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    return kind.tensor_type.elem_type


def load_cases() -> list[Case]:
    """All float-in float-out node cases, in name order."""
    raw = {test.name: test for test in _load_tests() if _is_float(test.model)}
    ops = {name: test.model.graph.node for name, test in raw.items()}
    cases = []
    for name in sorted(raw):
        base = _TWIN.sub("", name)
        nodes = ops.get(base, ops[name])
        op = nodes[0].op_type if len(nodes) == 1 else f"{nodes[-1].op_type}"
        cases.append(_case(raw[name], op))
    return cases


def _load_tests() -> list:
    state = np.random.get_state()
    np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # casts in onnx's own case files overflow on purpose
            from onnx.backend.test.loader import load_model_tests

            return [test for test in load_model_tests(kind="node") if test.data_sets]
    finally:
        np.random.set_state(state)


def _is_float(model: onnx.ModelProto) -> bool:
    return any(elem_type(v) in FLOATS for v in model.graph.input) and any(
        elem_type(v) in FLOATS for v in model.graph.output
    )


def _case(test, op: str) -> Case:
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    notes, unusable = _clamp(model), ""
    given, wanted = test.data_sets[0]
    inputs = {v.name: _array(a) for v, a in zip(model.graph.input, given, strict=False)}
    expected = {v.name: _array(a) for v, a in zip(model.graph.output, wanted, strict=False)}
    model, inputs, expected, border_notes = tensor_borders(model, inputs, expected)
    wrt = tuple(
        v.name
        for v in model.graph.input
        if v.name in inputs and v.type.tensor_type.elem_type in FLOATS
    )
    outputs = tuple(v.name for v in model.graph.output if v.type.tensor_type.elem_type in FLOATS)
    if not unusable and not any(inputs[name].size for name in wrt):
        unusable = "zero-size: no float input has an element"
    if not unusable and not any(expected[name].size for name in outputs):
        unusable = "zero-size: no float output has an element"
    unusable = unusable or _randomness(model, inputs)
    return Case(
        name=test.name,
        op=op,
        model=model.SerializeToString(deterministic=True),
        inputs=inputs,
        expected=expected,
        wrt=wrt,
        outputs=outputs,
        rtol=test.rtol,
        atol=test.atol,
        unusable=unusable,
        discrete=_discrete(model),
        standard_says_no=_not_differentiable(test.model),
        notes=(*notes, *border_notes),
    )


def _array(value):
    """A numpy array, a list of them for a sequence, or None for an empty optional."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_array(item) for item in value]
    if isinstance(value, onnx.TensorProto):
        return np.asarray(ir.from_proto(value).numpy())
    return np.asarray(value)


def _clamp(model: onnx.ModelProto) -> tuple[str, ...]:
    """Brings opset and IR stamps down to what stock onnxruntime loads; says what changed.

    An op whose schema changed after the newest opset is stamped down only where the old schema
    takes the node as it is; whether it means the same is then decided by the expected outputs.
    A model that cannot be stamped down keeps its stamp; its gradient may still do without.
    """
    stamp = next((o for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if stamp is None or stamp.version <= NEWEST_OPSET:
        model.ir_version = min(model.ir_version, NEWEST_IR)
        return ()
    notes = [f"opset {stamp.version} stamped {NEWEST_OPSET}"]
    for node in _nodes(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if not onnx.defs.has(node.op_type, NEWEST_OPSET):
            return (f"{node.op_type} is newer than opset {NEWEST_OPSET}",)
        new = onnx.defs.get_schema(node.op_type, stamp.version)
        old = onnx.defs.get_schema(node.op_type, NEWEST_OPSET)
        if new.since_version == old.since_version:
            continue
        if any(a.name not in old.attributes for a in node.attribute):
            return (f"{node.op_type} has attributes newer than opset {NEWEST_OPSET}",)
        note = f"{node.op_type} {new.since_version} read as {old.since_version}"
        if note not in notes:
            notes.append(note)
    clamped = onnx.ModelProto()
    clamped.CopyFrom(model)
    clamped.ir_version = min(model.ir_version, NEWEST_IR)
    next(o for o in clamped.opset_import if o.domain == stamp.domain).version = NEWEST_OPSET
    try:
        onnx.checker.check_model(clamped, full_check=True)
    except Exception:  # types, mostly: bfloat16 came to many ops after the newest opset
        return (f"not valid at opset {NEWEST_OPSET}",)
    model.CopyFrom(clamped)
    return tuple(notes)


def _randomness(model: onnx.ModelProto, inputs: dict) -> str:
    """Why two runs of the model differ, or nothing."""
    for node in _nodes(model.graph):
        if node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial"):
            return f"random: {node.op_type}"
        if node.op_type == "Dropout" and len(node.input) > 2:
            ratio, training = inputs.get(node.input[1], 0.5), inputs.get(node.input[2], False)
            if np.any(training) and np.any(ratio):
                return "random: Dropout in training mode"
    return ""


def _discrete(model: onnx.ModelProto) -> dict[str, str]:
    """Float inputs with respect to which the model is not differentiable."""
    ratios = (n.input[1] for n in model.graph.node if n.op_type == "Dropout" and len(n.input) > 2)
    return dict.fromkeys(ratios, "random: the ratio of Dropout decides what is dropped")


def _not_differentiable(model: onnx.ModelProto) -> frozenset[str]:
    """Inputs of a single node that the standard calls non-differentiable."""
    if len(model.graph.node) != 1:
        return frozenset()
    (node,) = model.graph.node
    version = next(o.version for o in model.opset_import if o.domain == node.domain)
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    no = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    # A variadic formal stands last and for all that follow; none of those says no.
    formals = zip(node.input, schema.inputs, strict=False)
    return frozenset(name for name, f in formals if name and f.differentiation_category == no)


def _nodes(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for sub in (attribute.g, *attribute.graphs):
                yield from _nodes(sub)
