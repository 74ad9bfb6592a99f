"""Small models in the style of exporters, and helpers for tests on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain import Trainer, build, losses
from onnxtrain.artifacts import Artifacts

FLOAT, INT64, BOOL, STRING = (
    int(onnx.TensorProto.DataType.Value(n)) for n in ("FLOAT", "INT64", "BOOL", "STRING")
)
RNG = np.random.default_rng(5)
Shape = Sequence[int | str | None]


def random(*shape: int) -> np.ndarray:
    """Numbers that look like weights."""
    return RNG.standard_normal(shape).astype(np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape | None],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    machine_learning: int | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    types: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of float inputs and outputs, unless ``types`` says otherwise."""
    kinds = types or {}

    graph = onnx.GraphProto(
        name="net",
        node=nodes,
        input=[info(n, s, kinds.get(n, FLOAT)) for n, s in inputs.items()],
        output=[info(n, s, kinds.get(n, FLOAT)) for n, s in outputs.items()],
        initializer=[tensor(n, a) for n, a in (weights or {}).items()],
    )
    imports = {"": opset, **{f.domain: 1 for f in functions}}
    if machine_learning is not None:
        imports["ai.onnx.ml"] = machine_learning
    return onnx.ModelProto(
        ir_version=9,
        graph=graph,
        functions=functions,
        opset_import=[onnx.OperatorSetIdProto(domain=d, version=v) for d, v in imports.items()],
    )


def info(name: str, shape: Shape | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    """Name, type and shape of an input or output."""
    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = kind
    if shape is not None:
        value.type.tensor_type.shape.SetInParent()
        for d in shape:
            size = value.type.tensor_type.shape.dim.add()
            if isinstance(d, int):
                size.dim_value = d
            elif d is not None:
                size.dim_param = d
    return value


def tensor(name: str, array: Any) -> onnx.TensorProto:
    """A stored tensor."""
    return ir.serde.serialize_tensor(ir.Tensor(np.asarray(array), name=name))


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    """Return a node; names are separated by blanks, ``-`` is an omitted input."""
    names = [("" if n == "-" else n) for n in inputs.split()]
    made = onnx.NodeProto(op_type=op, domain=domain, input=names, output=outputs.split())
    made.name = f"the_{made.output[0]}"
    for name, value in attributes.items():
        if isinstance(value, onnx.GraphProto):
            made.attribute.add(name=name, type=onnx.AttributeProto.GRAPH, g=value)
        else:
            attribute = ir.convenience.convert_attribute(name, value)
            made.attribute.append(ir.serde.serialize_attribute(attribute))
    return made


def constant(name: str, array: Any) -> onnx.NodeProto:
    """A Constant node."""
    made = onnx.NodeProto(op_type="Constant", output=[name])
    made.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=tensor(name, array))
    return made


def body(
    nodes: Sequence[onnx.NodeProto],
    outputs: Mapping[str, Shape | None],
    inputs: Sequence[onnx.ValueInfoProto] = (),
    weights: Mapping[str, Any] | None = None,
) -> onnx.GraphProto:
    """A body of If or Loop."""
    return onnx.GraphProto(
        name="body",
        node=nodes,
        input=inputs,
        output=[info(n, s) for n, s in outputs.items()],
        initializer=[tensor(n, a) for n, a in (weights or {}).items()],
    )


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[Any]:
    """What stock onnxruntime gives."""
    data = proto.SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def trained(names: Artifacts) -> set[str]:
    """The names of what a build trains."""
    return {w.name for w in names.manifest.parameters}


def train(
    proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, output: str = "y", **options: Any
) -> tuple[Artifacts, list[float], Trainer]:
    """Artifacts, losses and trainer of ten steps towards another output."""
    names = [o.name for o in proto.graph.output]
    before = run(proto, feeds)[names.index(output)]
    artifacts = build(
        proto,
        loss=losses.LossTerm("mse", output=output),
        optimizer=options.pop("optimizer", "adamw:lr=1e-3"),
        **options,
    )
    trainer = Trainer(artifacts)
    step = next(m for m in artifacts.manifest.models if m.role == "step")
    (target,) = [i.name for i in step.inputs if i.role == "target"]
    used = {i.name for i in step.inputs if i.role == "input"}
    batch = {n: a for n, a in feeds.items() if n in used}
    noise = np.random.default_rng(1).standard_normal(before.shape)
    goal = before + (0.3 * noise).astype(np.float32)
    curve = [float(trainer.step(**batch, **{target: goal}).loss) for _ in range(10)]
    return artifacts, curve, trainer


def falls(curve: Sequence[float]) -> bool:
    """Whether all losses are finite and the last is below the first."""
    return bool(np.isfinite(curve).all()) and curve[-1] < curve[0]
