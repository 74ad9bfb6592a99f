"""A module as an ONNX model that trains as the module does: exported, repaired, checked.

What a module takes and gives, by name.

New names for the parameters of an exported model, in all places that name them.

A model that came out of torch: any other model, with ways to write it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.artifacts.trainable import ALIASES, aliases_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save
from onnxtrain.graph.io.writer import strip_traces
from onnxtrain.graph.nodes import nodes
from onnxtrain.importer.parameters import FROZEN, PARAMETERS
from onnxtrain.modes import to_evaluation
from onnxtrain.torch import exporters
from onnxtrain.torch.checking import BATCH_NORMS, check, ignores_parameters, restore_statistics
from onnxtrain.torch.exporters import Axes, ExportError
from onnxtrain.torch.repairs import fix_masked_rows, flatten_tensors


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Example inputs in order, with their names and symbolic axes."""

    module: nn.Module
    """The module itself, or a view of it that takes keywords by position."""
    inputs: tuple[Any, ...]
    names: list[str]
    axes: Axes


class _PositionalModule(nn.Module):
    """A module whose keyword arguments come by position; names of parameters stay."""

    def __init__(self, module: nn.Module, keywords: Sequence[str]) -> None:
        super().__init__()
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = module._modules
        # Not by nn.Module's way, which would make it a submodule with a prefix of its own.
        self.__dict__["_whole"], self.__dict__["_keywords"] = module, tuple(keywords)
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training" and "_whole" in self.__dict__:
            self.__dict__["_whole"].training = value

    def forward(self, *tensors: Any) -> Any:
        keywords: tuple[str, ...] = self.__dict__["_keywords"]
        return self.__dict__["_whole"](**dict(zip(keywords, tensors, strict=True)))


def arguments_of(
    module: nn.Module,
    example: Any,
    names: Sequence[str] | None,
    dynamic_shapes: Any,
    dynamic_batch: bool,
) -> Arguments:
    """Return the arguments that an example stands for: a tensor, a tuple, or a dict of keywords.

    Raises:
        ExportError: if names or ``dynamic_shapes`` do not fit.
    """
    if isinstance(example, Mapping):
        keywords = [str(key) for key in example]
        inputs, view = tuple(example.values()), _PositionalModule(module, keywords)
        _check_keywords(module, keywords)
    else:
        inputs = example if isinstance(example, tuple) else (example,)
        keywords, view = _positional_names(module, len(inputs)), module
    labels = list(names) if names is not None else keywords
    _check_names(labels, len(inputs), "inputs")
    if isinstance(dynamic_shapes, Mapping):
        unknown = sorted(set(dynamic_shapes) - set(keywords) - set(labels))
        if unknown:
            raise ExportError(
                f"dynamic_shapes names {unknown[0]!r}, which is no input\n"
                f"hint: the inputs are {', '.join(labels)}"
            )
        both = zip(keywords, labels, strict=True)
        dynamic_shapes = [dynamic_shapes.get(k, dynamic_shapes.get(n)) for k, n in both]
    if dynamic_shapes is None:
        axes = _batch_axes(inputs) if dynamic_batch else [{} for _ in inputs]
    else:
        axes = [dict(a or {}) for a in dynamic_shapes]
    if len(axes) != len(inputs):
        raise ExportError(f"{len(inputs)} inputs, but dynamic_shapes has {len(axes)} entries")
    return Arguments(view, inputs, labels, axes)


def _check_keywords(module: nn.Module, keywords: Sequence[str]) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise ExportError(
            f"{type(module).__name__}.forward does not take these keywords: {error}\n"
            f"hint: its arguments are {', '.join(signature.parameters)}"
        ) from error


def _check_names(names: Sequence[str], count: int, what: str) -> None:
    if len(names) != count:
        raise ExportError(f"{count} {what}, but {len(names)} names")
    twice = sorted({n for n in names if list(names).count(n) > 1})
    if twice:
        raise ExportError(f"two {what} are called {twice[0]!r}\nhint: give each its own name")
    if not all(names):
        raise ExportError(f"one of the {what} has an empty name")


def _positional_names(module: nn.Module, count: int) -> list[str]:
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return parameters[:count] if len(parameters) >= count else [f"input_{i}" for i in range(count)]


def _batch_axes(inputs: Sequence[Any]) -> list[dict[int, str]]:
    """Name the first axes: equal sizes in the example count as the same size."""
    names: dict[int, str] = {}
    axes: list[dict[int, str]] = []
    for x in inputs:
        if not isinstance(x, torch.Tensor) or not x.dim():
            axes.append({})
            continue
        size = x.shape[0]
        names.setdefault(size, f"batch_{len(names) + 1}" if names else "batch")
        axes.append({0: names[size]})
    return axes


def name_outputs(
    model: ir.Model, given: Sequence[str] | None, module: nn.Module, inputs: Sequence[Any]
) -> None:
    """Give the outputs of the model these names, or those that the module itself has for them.

    Raises:
        ExportError: if there are not as many names as outputs, or one is taken.
    """
    own = given is None
    names = _module_output_names(module, inputs) if own else list(given)
    outputs = model.graph.outputs
    if names is None or (own and len(names) != len(outputs)):
        return
    _check_names(names, len(outputs), "outputs")
    op = OpBuilder(model.graph, "output/")
    fixed = {*(x.name for x in model.graph.inputs), *model.graph.initializers}
    taken = sorted(fixed.intersection(names))
    if taken and not own:
        raise ExportError(
            f"an output cannot be called {taken[0]!r}: an input or a parameter has that name"
        )
    names = [f"{n}.out" if n in fixed else n for n in names]
    for i, y in enumerate(outputs):
        if y.producer() is None or any(y is x for x in outputs[:i]):
            outputs[i] = op.Identity(y)
            outputs[i].type, outputs[i].shape = y.type, y.shape
    wanted = set(names)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in wanted:
                value.name = op.names.fresh(f"{value.name}.inner")
    for y, name in zip(outputs, names, strict=True):
        y.name = name


def _module_output_names(module: nn.Module, inputs: Sequence[Any]) -> list[str] | None:
    """Return the keys of the dict, or the fields of the named tuple, that the module gives."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restore_statistics(module):
        result = module(*inputs)
    if isinstance(result, Mapping):
        parts = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        parts = list(zip(result._fields, result, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        return None
    names: list[str] = []
    for key, value in parts:
        count = len(flatten_tensors(value))
        names += [key] if count == 1 else [f"{key}_{i}" for i in range(count)]
    return names


def rename_initializers(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Rename initializers in place, and what the model's metadata calls by their names."""
    graph, notes = model.graph, model.metadata_props
    for name in list(graph.initializers):
        if new_name(name) != name:
            value = graph.initializers.pop(name)
            value.name = new_name(name)
            graph.register_initializer(value)
    for key in (PARAMETERS, FROZEN):
        if key in notes:
            notes[key] = json.dumps(sorted(map(new_name, json.loads(notes[key]))))
    if ALIASES in notes:
        tied = {new_name(n): [new_name(x) for x in xs] for n, xs in aliases_of(model).items()}
        notes[ALIASES] = json.dumps(tied, sort_keys=True)


class ExportedModel(ir.Model):
    """What :func:`onnxtrain.torch.from_torch` returns: an ``onnx_ir.Model`` that can be saved."""

    __slots__ = ()

    @property
    def proto(self) -> onnx.ModelProto:
        """The model as ``onnx.save`` and ``onnx.checker`` take it, a new copy each time."""
        return ir.to_proto(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .onnx file, whole or not at all; beyond 2 GB weights go to ``<path>.data``.

        Raises:
            SaveError: if the file system refuses.
        """
        save(self, path)


def as_exported(model: ir.Model) -> ExportedModel:
    """Return the same model with ways to write it down, and without paths of this machine."""
    strip_traces(model)
    # Not a copy: it has no fields of its own, and versions of onnx_ir differ in what a copy takes.
    model.__class__ = ExportedModel
    assert isinstance(model, ExportedModel)
    return model


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
    with _restore_modes(call.module):
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
    with _restore_modes(module), torch.random.fork_rng(devices=[]):
        for name, exporter in (("dynamo", exporters.dynamo), ("legacy", exporters.legacy)):
            try:
                model, repairs = _try_export(exporter, module, inputs, names, axes, train)
                stored = _parameter_names(module, model, inputs)
                check(module, model, inputs, names, axes, train, stored)
            except ExportError as error:
                rejected.append(f"{name}: {error}")
                continue
            except Exception as error:  # the exporters raise whatever happens inside torch
                rejected.append(f"{name}: {_error_text(error)}")
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


def _try_export(
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
    with restore_statistics(module), _restore_modes(module):
        model = exporter(module, inputs, names, axes)
    _restore_buffers(module, model)
    masks = fix_masked_rows(model)
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
    if lost and ignores_parameters(module, inputs, lost):
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
def _restore_modes(module: nn.Module) -> Iterator[None]:
    """Leave the modes of all submodules as they were."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _error_text(error: BaseException) -> str:
    """Return what went wrong: exporters wrap it in advice for their own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
