"""A module as an ONNX model that trains as the module does: exported, repaired, checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.artifacts.pretrained_weights import ALIASES
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes import to_evaluation
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.roles import FROZEN, PARAMETERS
from onnxtrain.torch import torch_exporters as exporters
from onnxtrain.torch.arguments import arguments_of, name_outputs
from onnxtrain.torch.checking import BATCH_NORMS, check, ignores, untracked
from onnxtrain.torch.exported_model import ExportedModel, as_exported
from onnxtrain.torch.masked_rows import close_masked_rows
from onnxtrain.torch.torch_exporters import Axes, ExportError

_REPORT = "onnxtrain.export"


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
    train: bool | None = True,
    dynamic_batch: bool = True,
    names: Sequence[str] | None = None,
    dynamic_shapes: Sequence[Mapping[int, str] | None]
    | Mapping[str, Mapping[int, str] | None]
    | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ExportedModel:
    """Return the module as a model whose forward pass equals torch's, with every parameter.

    torch's exporters silently export BatchNorm in inference form, drop attention dropout and merge
    or fold parameters. What can be repaired is repaired; then the result is run and compared with
    torch, in evaluation mode and (with ``train``) in training mode, dropout aside, and at another
    batch size. Buffers other than running statistics become constants. Parameters without
    ``requires_grad`` stay as they are unless ``train=`` names them. :func:`last_report` tells what
    was done. The result is an ``onnx_ir.Model``; it has ``save(path)``, and ``proto`` for
    ``onnx.save``.

    Args:
        module: any module; its mode and parameters are left as they were.
        example_inputs: a tensor, a tuple of them, or a dict: the keywords of ``forward``.
        train: put BatchNorm and Dropout of the model into training mode; ``None`` leaves every
            submodule in the mode it is in.
        dynamic_batch: keep the first axis of every input symbolic: ``batch``, and another name
            where its size in the example is another one.
        names: the same as ``input_names``.
        dynamic_shapes: instead of ``dynamic_batch``: for each input its symbolic axes with names,
            in order or by the name of the input.
        input_names: of the model; by default those of ``forward``.
        output_names: of the model; by default the keys if the module gives a dict.

    Raises:
        ExportError: if no exporter gives a model that equals the module; it says why for each.
    """
    if names is not None and input_names is not None:
        raise ExportError("names and input_names mean the same\nhint: give input_names alone")
    given = input_names if input_names is not None else names
    call = arguments_of(module, example_inputs, given, dynamic_shapes, dynamic_batch)
    label = type(module).__name__
    model = export(call.module, call.inputs, call.names, call.axes, train=train, label=label)
    names_of = last_report(model).names
    stored = set(names_of.values())
    _fix_constants(model, stored)
    model.metadata_props[PARAMETERS] = json.dumps(sorted(stored & model.graph.initializers.keys()))
    frozen = {names_of[n] for n, p in call.module.named_parameters() if not p.requires_grad}
    if frozen:
        model.metadata_props[FROZEN] = json.dumps(sorted(frozen))
    with _restored(call.module):
        if train is not None:
            call.module.train(train)
        name_outputs(model, output_names, call.module, call.inputs)
    return as_exported(model)


def export(
    module: nn.Module,
    inputs: tuple[Any, ...],
    names: Sequence[str],
    axes: Axes,
    *,
    train: bool | None,
    label: str,
) -> ir.Model:
    """Do the work of :func:`from_torch`; ``label`` is what messages call the module."""
    rejected: list[str] = []
    with _restored(module), torch.random.fork_rng(devices=[]):
        for name, exporter in (("dynamo", exporters.dynamo), ("legacy", exporters.legacy)):
            try:
                model, repairs = _attempt(exporter, module, inputs, names, axes, train)
                stored = _parameter_names(module, model, inputs)
                check(module, model, inputs, names, axes, train, stored)
            except ExportError as error:
                rejected.append(f"{name}: {error}")
                continue
            except Exception as error:  # the exporters raise whatever happens inside torch
                rejected.append(f"{name}: {_told(error)}")
                continue
            model.meta[_REPORT] = ExportReport(name, tuple(repairs), tuple(rejected), stored)
            _record_aliases(model, stored)
            return model
    raise ExportError(
        f"{label} cannot be exported as it is:\n  " + "\n  ".join(rejected) + "\n"
        "hint: replace what the messages name, or export parts of the module"
    )


def _record_aliases(model: ir.Model, stored: Mapping[str, str]) -> None:
    aliases: dict[str, list[str]] = {}
    for name, at in stored.items():
        if name != at:
            aliases.setdefault(at, []).append(name)
    if aliases:
        model.metadata_props[ALIASES] = json.dumps(aliases, sort_keys=True)


def _fix_constants(model: ir.Model, parameters: set[str]) -> None:
    """Turn buffers and literals into Constant nodes, so that nobody takes them for parameters.

    Running statistics stay initializers: training replaces them.
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


def last_report(model: ir.Model) -> ExportReport:
    """Return the report of a model that :func:`from_torch` made."""
    return model.meta[_REPORT]


def _attempt(
    exporter: Callable[..., ir.Model],
    module: nn.Module,
    inputs: Sequence[Any],
    names: Sequence[str],
    axes: Axes,
    train: bool | None,
) -> tuple[ir.Model, list[str]]:
    if train is not None:
        module.train(train)
    # Exporters may leave the module in another mode; all that follows goes by the mode asked for.
    with untracked(module), _restored(module):
        model = exporter(module, inputs, names, axes)
    _restore_buffers(module, model)
    masks = close_masked_rows(model)
    repairs = [f"rows of attention that see no key give zeros: {masks} mask(s)"] if masks else []
    if any(part.training for part in module.modules()):
        return model, [*repairs, *_repair(module, model)]
    to_evaluation(model)
    return model, repairs


def _repair(module: nn.Module, model: ir.Model) -> list[str]:
    """Put BatchNorm and Dropout into training mode where the exporter did not."""
    op = OpBuilder(model.graph, "train/")
    norms = dropouts = 0
    statistics = {
        f"{name}.running_mean"
        for name, part in module.named_modules()
        if isinstance(part, BATCH_NORMS) and part.training and part.track_running_stats
    }
    for node in nodes(model.graph, "BatchNormalization", "Dropout", subgraphs=True):
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
    repairs = []
    if norms:
        repairs.append(f"BatchNormalization put into training mode: {norms} node(s)")
    if dropouts:
        repairs.append(f"Dropout put into training mode: {dropouts} node(s)")
    return repairs


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


def _parameter_names(module: nn.Module, model: ir.Model, inputs: Sequence[Any]) -> dict[str, str]:
    stored = model.graph.initializers
    twins: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        twins.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    lost = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        at = next((t for t in twins[id(parameter)] if t in stored), None)
        if at is None:
            lost.append(name)
        else:
            names[name] = at
    if lost and ignores(module, inputs, lost):
        for name in lost:
            at = twins[id(module.get_parameter(name))][0]
            if at not in stored:
                array = module.get_parameter(name).detach().cpu().numpy().copy()
                tensor = ir.Tensor(array, name=at)
                model.graph.register_initializer(
                    ir.Value(
                        name=at,
                        type=ir.TensorType(tensor.dtype),
                        shape=tensor.shape,
                        const_value=tensor,
                    )
                )
            names[name] = at
        lost = []
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ExportError(f"parameters got lost: {', '.join(lost[:5])}{more}")
    return names


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Leave the modes of all submodules as they were."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _told(error: BaseException) -> str:
    """Return what went wrong: exporters wrap it in advice for their own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
