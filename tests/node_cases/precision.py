"""A model with all its floats in double precision."""

import numpy as np
import onnx
import onnx_ir as ir

T = onnx.TensorProto
SMALL = (T.FLOAT, T.FLOAT16, T.BFLOAT16)
# Ops that make a float tensor when their attribute is absent.
_FLOAT_BY_DEFAULT = {
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "SequenceEmpty": "dtype",
    "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype",
    "BlackmanWindow": "output_datatype",
    "LayerNormalization": "stash_type",
    "RMSNormalization": "stash_type",
    "GroupNormalization": "stash_type",
}
_NARROW = "float32 of "
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "stash_type", "softmax_precision")


def to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32, float16 and bfloat16 widened to double wherever the ops allow it."""
    return _Widening(T.DOUBLE).apply(model)


def narrowed(model: onnx.ModelProto) -> set[str]:
    """Values that `to_double` has to cast back to float32, since an op takes nothing else."""
    wide = to_double(model)
    casts = (n for n in wide.graph.node if n.op_type == "Cast" and n.output[0].startswith(_NARROW))
    return {n.input[0] for n in casts}


def to_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float16 and bfloat16 widened to float32."""
    return _Widening(T.FLOAT).apply(model)


def double_array(array: np.ndarray) -> np.ndarray:
    """The array in float64 if it holds floats of 16 or 32 bits, else unchanged."""
    narrow = array.dtype.name in ("float32", "float16", "bfloat16")
    return array.astype(np.float64) if narrow else array


def single_array(array: np.ndarray) -> np.ndarray:
    """The array in float32 if it holds floats of 16 bits, else unchanged."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array


class _Widening:
    """Rewrites float types to a wider one, in place, on a copy of a model."""

    def __init__(self, to: int):
        self.to = to
        self.narrow = SMALL if to == T.DOUBLE else SMALL[1:]
        self.opset = 1

    def apply(self, model: onnx.ModelProto) -> onnx.ModelProto:
        wide = onnx.ModelProto()
        wide.CopyFrom(model)
        versions = [o.version for o in wide.opset_import if o.domain in ("", "ai.onnx")]
        self.opset = versions[0] if versions else 1
        self.graph(wide.graph)
        return wide

    def graph(self, graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            self.type(value.type)
        del graph.value_info[:]
        for tensor in graph.initializer:
            self.tensor(tensor)
        nodes = list(graph.node)
        del graph.node[:]
        for index, node in enumerate(nodes):
            self.attributes(node)
            doubles = self.to == T.DOUBLE
            graph.node.extend(_with_fixed_types(node, self.opset, index) if doubles else [node])

    def type(self, kind: onnx.TypeProto) -> None:
        while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
            kind = getattr(kind, kind.WhichOneof("value")).elem_type
        if kind.tensor_type.elem_type in self.narrow:
            kind.tensor_type.elem_type = self.to

    def tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type in self.narrow:
            array = np.asarray(ir.from_proto(tensor).numpy())
            tensor.CopyFrom(self.make(array, array.shape, tensor.name))

    def make(self, values, shape, name: str = "") -> onnx.TensorProto:
        raw = np.asarray(values).astype("<f8" if self.to == T.DOUBLE else "<f4").tobytes()
        return onnx.TensorProto(name=name, data_type=self.to, dims=shape, raw_data=raw)

    def attributes(self, node: onnx.NodeProto) -> None:
        kinds = onnx.AttributeProto
        for attribute in node.attribute:
            if attribute.type == kinds.GRAPH:
                self.graph(attribute.g)
            elif attribute.type == kinds.TENSOR:
                self.tensor(attribute.t)
            elif attribute.type == kinds.TYPE_PROTO:
                self.type(attribute.tp)
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in self.narrow:
                attribute.i = self.to
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                many = attribute.name == "value_floats"
                values = list(attribute.floats) if many else attribute.f
                tensor = self.make(values, [len(values)] if many else [])
                attribute.Clear()
                attribute.name, attribute.type = "value", kinds.TENSOR
                attribute.t.CopyFrom(tensor)
        if self.to != T.DOUBLE:
            return
        given = {a.name for a in node.attribute}
        default = _FLOAT_BY_DEFAULT.get(node.op_type)
        if default and default not in given:
            schema = onnx.defs.get_schema(node.op_type, self.opset)
            if default in schema.attributes:
                node.attribute.add(name=default, type=kinds.INT, i=T.DOUBLE)
        if node.op_type == "ConstantOfShape" and "value" not in given:
            node.attribute.add(name="value", type=kinds.TENSOR).t.CopyFrom(self.make([0.0], [1]))


def _with_fixed_types(node: onnx.NodeProto, opset: int, index: int) -> list[onnx.NodeProto]:
    """The node between the casts that its float-only inputs and outputs need."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset):
        return [node]
    schema = onnx.defs.get_schema(node.op_type, opset)
    before, after = [], []
    for position, name in enumerate(node.input):
        if name and _fixed(schema.inputs, position):
            cast = f"{_NARROW}{name}.{node.op_type}.{index}"
            before.append(_cast(name, cast, T.FLOAT))
            node.input[position] = cast
    for position, name in enumerate(node.output):
        if name and _fixed(schema.outputs, position):
            narrow = f"{name}.float"
            after.append(_cast(narrow, name, T.DOUBLE))
            node.output[position] = narrow
    return [*before, node, *after]


def _fixed(formals, position: int) -> bool:
    if not formals:
        return False
    formal = formals[min(position, len(formals) - 1)]
    return formal.type_str == "tensor(float)" or set(formal.types) == {"tensor(float)"}


def _cast(source: str, target: str, to: int) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type="Cast", input=[source], output=[target])
    node.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return node
