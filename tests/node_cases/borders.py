"""Sequences and optionals at a model's borders, rewritten as tensors."""

import onnx


def tensor_borders(
    model: onnx.ModelProto, inputs: dict, expected: dict
) -> tuple[onnx.ModelProto, dict, dict, tuple[str, ...]]:
    """The same case with every sequence or optional input and output taken apart into tensors.

    An input sequence of n tensors becomes n inputs and a SequenceConstruct; an output sequence
    becomes one output and one SequenceAt per element. Optionals likewise, where they hold a value.
    """
    graph = model.graph
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    new_inputs, new_outputs = [], []
    feeds: dict = {}
    wanted: dict = {}
    notes: list[str] = []
    for value in graph.input:
        if value.name not in inputs:
            new_inputs.append(value)
            continue
        held = inputs[value.name]
        if value.type.HasField("tensor_type"):
            new_inputs.append(value)
            feeds[value.name] = held
            continue
        notes.append(f"{value.name} taken apart")
        new_inputs += _take_apart_input(value, held, before, feeds)
    for value in graph.output:
        held = expected[value.name]
        if value.type.HasField("tensor_type"):
            new_outputs.append(value)
            wanted[value.name] = held
            continue
        notes.append(f"{value.name} taken apart")
        new_outputs += _take_apart_output(value, held, after, constants, wanted)
    if not notes:
        return model, feeds, wanted, ()
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.input.extend(new_inputs)
    graph.output.extend(new_outputs)
    graph.initializer.extend(constants)
    return model, feeds, wanted, tuple(notes)


def _tensor_value(name: str, elem: int, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    value = onnx.ValueInfoProto(name=name)
    tensor = value.type.tensor_type
    tensor.elem_type = elem
    tensor.shape.SetInParent()
    for dim in shape:
        tensor.shape.dim.add().dim_value = dim
    return value


def _innermost(kind: onnx.TypeProto) -> int:
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, kind.WhichOneof("value")).elem_type
    return kind.tensor_type.elem_type


def _take_apart_input(value, held, before: list, feeds: dict) -> list[onnx.ValueInfoProto]:
    kind = value.type
    elem = _innermost(kind)
    is_optional = kind.HasField("optional_type")
    inner = kind.optional_type.elem_type if is_optional else kind
    target = value.name
    if is_optional:
        source = f"{value.name}.held"
        node = onnx.NodeProto(op_type="Optional", output=[value.name])
        if held is None:
            node.attribute.add(name="type", type=onnx.AttributeProto.TYPE_PROTO).tp.CopyFrom(inner)
            before.append(node)
            return []
        node.input.append(source)
        target = source
    if inner.HasField("tensor_type"):
        item = held[0] if isinstance(held, list) else held
        feeds[target] = item
        values = [_tensor_value(target, elem, item.shape)]
    else:
        names = [f"{value.name}.{i}" for i in range(len(held))]
        feeds.update(zip(names, held, strict=True))
        values = [_tensor_value(n, elem, a.shape) for n, a in zip(names, held, strict=True)]
        if names:
            maker = onnx.NodeProto(op_type="SequenceConstruct", input=names, output=[target])
        else:
            maker = onnx.NodeProto(op_type="SequenceEmpty", output=[target])
            maker.attribute.add(name="dtype", type=onnx.AttributeProto.INT, i=elem)
        before.append(maker)
    if is_optional:
        before.append(node)
    return values


def _take_apart_output(value, held, after, constants, wanted) -> list[onnx.ValueInfoProto]:
    kind = value.type
    elem = _innermost(kind)
    source = value.name
    if kind.HasField("optional_type"):
        kind = kind.optional_type.elem_type
        if held is None:
            return []
        inner = f"{source}.held"
        after.append(onnx.NodeProto(op_type="OptionalGetElement", input=[source], output=[inner]))
        if kind.HasField("tensor_type"):
            item = held[0] if isinstance(held, list) else held
            wanted[inner] = item
            return [_tensor_value(inner, elem, item.shape)]
        source = inner
    values = []
    for i, item in enumerate(held):
        name, at = f"{value.name}.{i}", f"{value.name}.at.{i}"
        constants.append(
            onnx.TensorProto(name=at, data_type=onnx.TensorProto.INT64, int64_data=[i])
        )
        after.append(onnx.NodeProto(op_type="SequenceAt", input=[source, at], output=[name]))
        wanted[name] = item
        values.append(_tensor_value(name, elem, item.shape))
    return values
