"""Repair what torch's exporters lose.

``set_training_mode`` puts BatchNormalization and Dropout back into training mode.
``restore_buffers`` undoes the exporter's own update of running statistics.
``buffers_to_constants`` separates buffers from parameters. ``fix_masked_rows`` makes fully masked
attention rows zero, as in torch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from torch import nn

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nan_guard, nodes

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def set_training_mode(module: nn.Module, model: ir.Model) -> list[str]:
    """Put BatchNorm and Dropout into training mode where the exporter did not; list the repairs."""
    op = OpBuilder(model.graph, "train/")
    norms = dropouts = 0
    statistics = {
        f"{name}.running_mean"
        for name, submodule in module.named_modules()
        if isinstance(submodule, BATCH_NORMS)
        and submodule.training
        and submodule.track_running_stats
    }
    for node in nodes(model.graph, "BatchNormalization", "Dropout", subgraphs=True):
        if node.op_type == "BatchNormalization":
            mean = node.inputs[3]
            mode = node.attributes.get("training_mode")
            if mode is not None and mode.as_int():
                continue
            if mean is not None and mean.name in statistics:
                node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
                _add_statistics_outputs(op, node)
                norms += 1
        elif node.op_type == "Dropout" and len(node.inputs) < 3:
            ratio = node.inputs[1] if len(node.inputs) > 1 else None
            node.resize_inputs(3)
            if ratio is None:
                node.replace_input_with(1, op.const(0.5, ir.DataType.FLOAT))
            node.replace_input_with(2, op.const(True))
            dropouts += 1
    repairs = []
    if norms:
        repairs.append(f"BatchNormalization put into training mode: {norms} node(s)")
    if dropouts:
        repairs.append(f"Dropout put into training mode: {dropouts} node(s)")
    return repairs


def _add_statistics_outputs(op: OpBuilder, node: ir.Node) -> None:
    """Add the outputs that training mode requires: the updated running statistics."""
    node.resize_outputs(3)
    for i in (1, 2):
        out, old = node.outputs[i], node.inputs[i + 2]
        assert old is not None
        out.name = op.names.fresh(f"{node.outputs[0].name}.{i}")
        out.type, out.shape = old.type, old.shape


def restore_buffers(module: nn.Module, model: ir.Model) -> None:
    """Undo the update of running statistics by the exporter's own forward pass."""
    for name, buffer in module.named_buffers():
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = ir.Tensor(buffer.detach().cpu().numpy().copy(), name=name)


def buffers_to_constants(model: ir.Model, parameters: set[str]) -> None:
    """Turn buffers and literals into Constant nodes, so that nothing reads them as parameters.

    Running statistics stay initializers: training updates them.
    """
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if name in parameters or not S.is_float(value) or value.const_value is None:
            continue
        if any(use.node.op_type == "BatchNormalization" and use.idx > 2 for use in value.uses()):
            continue
        node = ir.node(
            "Constant", [], attributes={"value": ir.AttrTensor("value", value.const_value)}
        )
        (new,) = node.outputs
        new.type, new.shape = value.type, value.shape
        value.replace_all_uses_with(new, replace_graph_outputs=True)
        del graph.initializers[name]
        new.name = name
        first = next(iter(graph), None)
        if first is None:
            graph.append(node)
        else:
            graph.insert_before(first, node)


def fix_masked_rows(model: ir.Model) -> int:
    """Replace the lowest float with -inf in attention masks; return how many masks changed.

        before:  Where(mask, 0, -3.4e38) -> Add -> Softmax -> NaN guard
        after:   Where(mask, 0, -inf)    -> Add -> Softmax -> NaN guard

    torch's exporter writes boolean masks with the lowest float, so a fully masked row (left padding
    has such rows) becomes the mean of all values and never reaches the NaN guard. With -inf the row
    is NaN, and the guard makes it zero, as in torch. Masks with other uses stay.
    """
    op, replaced = OpBuilder(model.graph, "mask/"), 0
    for node in nodes(model.graph, "Where", subgraphs=True):
        mask = node.outputs[0]
        if mask.is_graph_output() or not all(_is_guarded(use.node) for use in mask.uses()):
            continue
        value = node.inputs[2] if mask.uses() else None
        low = None if value is None else ir.convenience.get_const_tensor(value)
        if low is None or low.size != 1 or not low.dtype.is_floating_point():
            continue
        if float(low.numpy().item()) == float(low.dtype.min):
            node.replace_input_with(2, op.const(-np.inf, low.dtype))
            replaced += 1
    return replaced


def _is_guarded(add: ir.Node) -> bool:
    """Return whether the sum feeds only a softmax whose NaN are replaced with zeros."""
    consumers = [use.node for use in add.outputs[0].uses()]
    if not is_op(add, "Add") or len(consumers) != 1 or not is_op(consumers[0], "Softmax"):
        return False
    return nan_guard(consumers[0].outputs[0]) is not None
