"""A module as an ONNX model that trains as the module does: exported, repaired, checked."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.autodiff.gradients import lift
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes import to_evaluation
from onnxtrain.runtime import session as runtime
from onnxtrain.torch import exporters
from onnxtrain.torch.exporters import ExportError

_REPORT = "onnxtrain.export"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_TOLERANCE = 1e-3
"""Largest difference to torch that counts as rounding, relative to the largest output."""


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """How a module was exported and what had to be repaired."""

    exporter: str
    repairs: tuple[str, ...]
    rejected: tuple[str, ...]
    """Why exporters that were tried before were not used."""
    names: dict[str, str]
    """Parameter of the module -> initializer of the model; tied ones share an initializer."""


def from_torch(
    module: nn.Module,
    example_inputs: Any,
    *,
    train: bool = True,
    dynamic_batch: bool = True,
    names: Sequence[str] | None = None,
) -> ir.Model:
    """Give the module as a model whose forward pass equals torch's, with every parameter.

    torch's exporters silently export BatchNorm in inference form, drop attention dropout and merge
    or fold parameters. What can be repaired is repaired; then the result is run and compared with
    torch, in evaluation mode and (with ``train``) in training mode, dropout aside.
    :func:`last_report` tells what was done.

    Args:
        module: any module; its mode and parameters are left as they were.
        example_inputs: a tensor or a tuple of them.
        train: put BatchNorm and Dropout of the model into training mode.
        dynamic_batch: keep the first axis of every input symbolic, as ``batch``.
        names: of the inputs; by default those of ``forward``.

    Raises:
        ExportError: if no exporter gives a model that equals the module; it says why for each.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    labels = list(names) if names is not None else _argument_names(module, len(inputs))
    if len(labels) != len(inputs):
        raise ExportError(f"{len(inputs)} inputs, but {len(labels)} names")
    batched = [dynamic_batch and isinstance(x, torch.Tensor) and x.dim() > 0 for x in inputs]
    rejected: list[str] = []
    with _restored(module):
        for name, exporter in (("dynamo", exporters.dynamo), ("legacy", exporters.legacy)):
            try:
                model, repairs = _attempt(exporter, module, inputs, labels, batched, train)
                stored = _parameter_names(module, model)
                _check(module, model, inputs, labels, train)
            except ExportError as error:
                rejected.append(f"{name}: {error}")
                continue
            except Exception as error:  # the exporters raise whatever happens inside torch
                rejected.append(f"{name}: {type(error).__name__}: {_first_line(error)}")
                continue
            report = ExportReport(name, tuple(repairs), tuple(rejected), stored)
            model.meta[_REPORT] = report
            return model
    raise ExportError(
        f"{type(module).__name__} cannot be exported as it is:\n  " + "\n  ".join(rejected) + "\n"
        "hint: replace what the messages name, or export parts of the module"
    )


def last_report(model: ir.Model) -> ExportReport:
    """Give the report of a model that :func:`from_torch` made."""
    return model.meta[_REPORT]


def _attempt(
    exporter: Callable[..., ir.Model],
    module: nn.Module,
    inputs: Sequence[Any],
    names: Sequence[str],
    batched: Sequence[bool],
    train: bool,
) -> tuple[ir.Model, list[str]]:
    module.train(train)
    with _untracked_statistics(module):
        model = exporter(module, inputs, names, batched)
    _restore_buffers(module, model)
    repairs = _repair(module, model) if train else []
    if not train:
        to_evaluation(model)
    return model, repairs


def _repair(module: nn.Module, model: ir.Model) -> list[str]:
    """Put BatchNorm and Dropout into training mode where the exporter did not."""
    op = OpBuilder(model.graph, "train/")
    norms = dropouts = 0
    statistics = {
        f"{name}.running_mean"
        for name, part in module.named_modules()
        if isinstance(part, _BATCH_NORMS) and part.training and part.track_running_stats
    }
    for node in list(model.graph.all_nodes()):
        if node.domain != "":
            continue
        if node.op_type == "BatchNormalization":
            mean = node.inputs[3]
            mode = node.attributes.get("training_mode")
            if mode is not None and mode.as_int():
                continue
            if mean is not None and mean.name in statistics:
                node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
                _give_statistics(op, node)
                norms += 1
        elif node.op_type == "Dropout" and len(node.inputs) < 3:
            ratio = node.inputs[1] if len(node.inputs) > 1 else None
            node.resize_inputs(3)
            if ratio is None:
                node.replace_input_with(1, op.const(0.5, ir.DataType.FLOAT))
            node.replace_input_with(2, op.const(True))
            dropouts += 1
    found = []
    if norms:
        found.append(f"BatchNormalization put into training mode: {norms} node(s)")
    if dropouts:
        found.append(f"Dropout put into training mode: {dropouts} node(s)")
    return found


def _give_statistics(op: OpBuilder, node: ir.Node) -> None:
    """Add the outputs that training mode demands: the new running statistics."""
    node.resize_outputs(3)
    for i in (1, 2):
        out, old = node.outputs[i], node.inputs[i + 2]
        assert old is not None
        out.name = op.names.fresh(f"{node.outputs[0].name}.{i}")
        out.type, out.shape = old.type, old.shape


def _restore_buffers(module: nn.Module, model: ir.Model) -> None:
    """Undo what the exporter's own forward pass did to running statistics."""
    for name, buffer in module.named_buffers():
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = ir.Tensor(buffer.detach().cpu().numpy().copy(), name=name)


def _parameter_names(module: nn.Module, model: ir.Model) -> dict[str, str]:
    stored = model.graph.initializers
    twins: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        twins.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    lost = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        at = next((t for t in twins[id(parameter)] if t in stored), None)
        if at is None:
            lost.append(name)
        else:
            found[name] = at
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ExportError(f"parameters got lost: {', '.join(lost[:5])}{more}")
    return found


def _check(
    module: nn.Module, model: ir.Model, inputs: Sequence[Any], names: Sequence[str], train: bool
) -> None:
    """Compare with torch: in evaluation mode, and with training statistics but without dropout."""
    plain = model.clone()
    to_evaluation(plain)
    module.eval()
    _compare(module, plain, inputs, names, "evaluation mode")
    if not train:
        return
    module.train()
    with _untracked_statistics(module), _no_dropout(module):
        work = model.clone()
        _remove_dropout(work)
        _compare(module, work, inputs, names, "training mode")


def _compare(
    module: nn.Module, model: ir.Model, inputs: Sequence[Any], names: Sequence[str], mode: str
) -> None:
    with torch.no_grad():
        want = _flat(module(*copy.deepcopy(tuple(inputs))))
    # As inputs, since onnxruntime folds a BatchNorm into the convolution before it even if it is in
    # training mode, once all weights are constants; as copies, since it writes the new running
    # statistics over the old ones.
    work = model.clone()
    weights = [x for x in work.graph.initializers.values() if S.is_float(x)]
    values = {
        x.name or "": np.array(x.const_value.numpy()) for x in weights if x.const_value is not None
    }
    lift(work.graph, weights)
    session = runtime.create(ir.to_proto(work).SerializeToString(), threads=1)
    known = {i.name for i in session.get_inputs()}
    feeds = {n: v for n, v in values.items() if n in known}
    feeds |= {
        n: x.detach().cpu().numpy()
        for n, x in zip(names, inputs, strict=True)
        if n in known and isinstance(x, torch.Tensor)
    }
    got = runtime.run(session, None, feeds)
    if len(got) < len(want):
        raise ExportError(f"{len(want)} outputs in torch, {len(got)} in the model")
    for i, (a, b) in enumerate(zip(want, got, strict=False)):
        x = a.detach().cpu().numpy()
        if x.shape != b.shape:
            raise ExportError(
                f"{mode}: output {i} has shape {list(b.shape)}, torch {list(x.shape)}"
            )
        if x.dtype.kind != "f":
            continue
        scale = max(float(np.abs(x).max(initial=0.0)), 1e-6)
        worst = float(np.abs(x.astype(np.float64) - b).max(initial=0.0)) / scale
        if not worst <= _TOLERANCE:
            raise ExportError(f"{mode}: output {i} differs from torch by {worst:.2g} of its size")


def _flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return [t for o in outputs for t in _flat(o)] if isinstance(outputs, list | tuple) else []


def _remove_dropout(model: ir.Model) -> None:
    keep = [
        (n, n.attributes["training_mode"])
        for n in model.graph.all_nodes()
        if n.op_type == "BatchNormalization" and "training_mode" in n.attributes
    ]
    for node, mode in keep:  # hidden from to_evaluation, which would switch them off
        if mode.as_int():
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    to_evaluation(model)
    for node, mode in keep:
        node.attributes["training_mode"] = mode


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Leave the modes of all submodules as they were."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def _untracked_statistics(module: nn.Module) -> Iterator[None]:
    """Put running statistics back after forward passes in training mode."""
    saved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])


@contextlib.contextmanager
def _no_dropout(module: nn.Module) -> Iterator[None]:
    """Set every drop probability to zero, those of attention and recurrent layers included."""
    saved: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        names = ["p"] if isinstance(part, _DROPOUTS) else ["dropout", "dropout_p"]
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, float):
                saved.append((part, name, value))
                setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in saved:
            setattr(part, name, value)


def _argument_names(module: nn.Module, count: int) -> list[str]:
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return parameters[:count] if len(parameters) >= count else [f"input_{i}" for i in range(count)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
