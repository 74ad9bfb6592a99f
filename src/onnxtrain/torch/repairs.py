"""Repair what torch's exporters lose.

``set_training_mode`` puts BatchNormalization and Dropout back into training mode.
``restore_buffers`` undoes the exporter's own update of running statistics.
``buffers_to_constants`` separates buffers from parameters. ``fix_masked_rows`` makes fully masked
attention rows zero, as in torch. ``block_padding_gradients`` gives the rows of ``padding_idx`` no
gradient; options of embeddings that ONNX cannot express are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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


_F = nn.functional
_EMBEDDINGS: dict[Any, tuple[str, ...]] = {
    _F.embedding: (
        *("indices", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"),
        "sparse",
    ),
    torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
    _F.embedding_bag: (
        *("indices", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode"),
        *("sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
    ),
}
"""Functions that look up rows of a table, with the names of their arguments."""


def embedding_options(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that looks up rows of a table; empty for other calls."""
    names = _EMBEDDINGS.get(func)
    if names is None:
        return {}
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    padding = given.get("padding_idx")
    if padding is not None and padding < 0 and func is _F.embedding:
        given["padding_idx"] = padding + len(given["weight"])
    return given


class EmbeddingCalls(TorchFunctionMode):
    """Record how a module looks up rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.paddings: dict[int, list[int]] = {}
        """``padding_idx`` of each call, -1 for none, by the id of the table."""
        self.unsupported: set[str] = set()
        self.bags: set[str] = set()
        """Options of ``embedding_bag`` whose exports crash onnxruntime or ignore them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = embedding_options(func, args, kwargs)
        if given and func is not _F.embedding_bag:
            padding = given.get("padding_idx")
            padding = -1 if padding is None else int(padding)
            self.paddings.setdefault(id(given["weight"]), []).append(padding)
        if given and func is _F.embedding_bag:
            mode, padding = given.get("mode", "mean"), given.get("padding_idx")
            self.bags |= {"mode='mean'"} if mode == "mean" else set()
            self.bags |= {"padding_idx"} if padding is not None else set()
        self.unsupported.update(n for n in ("max_norm", "scale_grad_by_freq") if given.get(n))
        return func(*args, **kwargs)


def block_padding_gradients(model: ir.Model, paddings: Mapping[str, Sequence[int]]) -> int:
    """Stop the gradient of the rows that ``padding_idx`` selects; return how many lookups changed.

        before:  Gather(table, ids) -> y
        after:   Where(ids == padding_idx, stop_gradient(y), y)

    Args:
        model: the exported model.
        paddings: ``padding_idx`` of each call by the initializer of its table, -1 for none.

    Raises:
        ValueError: some lookups of a table have a ``padding_idx``, others have not.
    """
    op, changed = OpBuilder(model.graph, "padding/"), 0
    for name, indices in paddings.items():
        table = model.graph.initializers.get(name)
        if table is None or set(indices) == {-1}:
            continue
        lookups = [use.node for use in table.uses() if is_op(use.node, "Gather")]
        (index, *others) = set(indices)
        if (
            others
            or len(lookups) > len(indices)
            or any(n.graph is not model.graph for n in lookups)
        ):
            raise ValueError(
                f"{name!r} is looked up with padding_idx and without it, or with several"
            )
        for node in lookups:
            y, ids = node.outputs[0], node.inputs[1]
            readers, outputs = list(y.uses()), y.is_graph_output()
            assert ids is not None
            y.type = y.type or table.type  # the legacy exporter leaves out types
            after = OpBuilder(model.graph, parent=op, before=_next(node))
            chosen = after.Unsqueeze(after.Equal(ids, after.const(index, ids.dtype)), [-1])
            result = after.Where(chosen, after.stop_gradient(y), y)
            for use in readers:
                use.node.replace_input_with(use.idx, result)
            if outputs:
                result.name, y.name = y.name, op.names.fresh("padding/rows")
                model.graph.outputs[:] = [result if x is y else x for x in model.graph.outputs]
            changed += 1
    return changed


def _next(node: ir.Node) -> ir.Node | None:
    nodes_after = list(node.graph or ())
    at = nodes_after.index(node) + 1
    return nodes_after[at] if at < len(nodes_after) else None


def _is_guarded(add: ir.Node) -> bool:
    """Return whether the sum feeds only a softmax whose NaN are replaced with zeros."""
    consumers = [use.node for use in add.outputs[0].uses()]
    if not is_op(add, "Add") or len(consumers) != 1 or not is_op(consumers[0], "Softmax"):
        return False
    return nan_guard(consumers[0].outputs[0]) is not None
