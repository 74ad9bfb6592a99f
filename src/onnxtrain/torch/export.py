"""Export a torch module to an ONNX model that trains as the module does.

:func:`from_torch` tries torch's exporters in turn, repairs their output (``repairs.py``) and
compares it with the module (``checking.py``). Example inputs and names come last in this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.artifacts.trainable import ALIASES, aliases_of
from onnxtrain.errors import expected_one_of
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save
from onnxtrain.graph.io.writer import strip_traces
from onnxtrain.importer.parameters import FROZEN, PARAMETERS
from onnxtrain.modes import to_evaluation
from onnxtrain.torch import exporters
from onnxtrain.torch.calls import stateful_buffers
from onnxtrain.torch.checking import (
    check,
    detached_copy,
    flatten_tensors,
    ignores_parameters,
    longer_inputs,
    restore_statistics,
)
from onnxtrain.torch.exporters import Axes, ExportError
from onnxtrain.torch.repairs import (
    EmbeddingCalls,
    block_padding_gradients,
    buffers_to_constants,
    fix_masked_rows,
    restore_buffers,
    set_training_mode,
)

logger = logging.getLogger(__name__)
_REPORT = "onnxtrain.export"


class ExportedModel(ir.Model):
    """An ``onnx_ir.Model`` from :func:`onnxtrain.torch.from_torch`, with ``proto`` and ``save``."""

    __slots__ = ()

    @classmethod
    def from_model(cls, model: ir.Model) -> ExportedModel:
        """Return a model that shares the graph and the functions of ``model``."""
        exported = cls(
            model.graph,
            ir_version=model.ir_version,
            producer_name=model.producer_name,
            producer_version=model.producer_version,
            domain=model.domain,
            model_version=model.model_version,
            doc_string=model.doc_string,
            functions=tuple(model.functions.values()),
            metadata_props=dict(model.metadata_props),
        )
        exported.meta.update(model.meta)
        return exported

    @property
    def proto(self) -> onnx.ModelProto:
        """A new ``onnx.ModelProto`` of the model, for ``onnx.save`` and ``onnx.checker``."""
        return ir.to_proto(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .onnx file atomically; above 2 GB, weights go to ``<path>.data``.

        Raises:
            SaveError: if the file cannot be written.
        """
        save(self, path)


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """How a module was exported, and what was repaired."""

    exporter: str
    repairs: tuple[str, ...]
    rejected: tuple[str, ...]
    """Exporters that were tried first, each with the reason it was rejected."""
    names: dict[str, str]
    """Parameter of the module -> initializer of the model; tied parameters share one."""
    fixed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Sizes that are not symbolic although they were requested to be, each with the reason."""


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
    """Export a module to a model with all its parameters and the same forward pass.

    torch's exporters silently export BatchNorm in inference mode, drop attention dropout and merge
    or fold parameters. ``from_torch`` repairs the export, then compares it with the module: in
    evaluation mode, with ``train`` in training mode (without dropout), and with another value of
    each symbolic size. A size with which the module itself does not run when it is another one is
    fixed in the model; the report says why.
    Buffers other than running statistics become constants. Parameters with
    ``requires_grad=False`` are frozen unless ``build(train=...)`` selects them.
    :func:`last_report` returns the exporter used and the repairs.

    Args:
        module: any module; its mode and parameters do not change.
        example_inputs: a tensor, a tuple of tensors, or a dict of keyword arguments of ``forward``.
        train: put BatchNorm and Dropout of the model into training mode; ``None`` keeps the mode of
            every submodule.
        dynamic_batch: make the first axis of every input symbolic. It is named ``batch``; inputs
            with another size in the example get another name.
        names: the same as ``input_names``.
        dynamic_shapes: symbolic axes of each input with their names, in order or by input name;
            replaces ``dynamic_batch``.
        input_names: names of the model's inputs; by default the arguments of ``forward``.
        output_names: names of the model's outputs; by default the keys if the module returns a
            dict.

    Returns:
        An ``onnx_ir.Model`` with ``save(path)``, and ``proto`` for ``onnx.save``.

    Raises:
        ExportError: if no exporter produces a model that matches the module; names the reason for
            each exporter. Also if the module changes buffers that its next results depend on.
    """
    if names is not None and input_names is not None:
        raise ExportError("names and input_names are the same option\nhint: pass input_names only")
    input_names = names if input_names is None else input_names
    call = _resolve_arguments(module, example_inputs, input_names, dynamic_shapes, dynamic_batch)
    label = type(module).__name__
    model = export_module(call.module, call.inputs, call.names, call.axes, train=train, label=label)
    names_of = last_report(model).names
    parameters = set(names_of.values())
    buffers_to_constants(model, parameters)
    model.metadata_props[PARAMETERS] = json.dumps(
        sorted(parameters & model.graph.initializers.keys())
    )
    frozen = {names_of[n] for n, p in call.module.named_parameters() if not p.requires_grad}
    if frozen:
        model.metadata_props[FROZEN] = json.dumps(sorted(frozen))
    with _restore_modes(call.module):
        if train is not None:
            call.module.train(train)
        _check_state(call.module, call.inputs, label)
        _name_outputs(model, output_names, call.module, call.inputs)
    strip_traces(model)  # no paths of this machine in the file
    return ExportedModel.from_model(model)


def _check_state(module: nn.Module, inputs: Sequence[Any], label: str) -> None:
    changed = stateful_buffers(module, inputs)
    if changed:
        raise ExportError(
            f"{label} changes buffers in forward that its next results depend on: "
            f"{', '.join(changed)}\n"
            "hint: a model trains with the buffers of its export; change them outside of forward, "
            "or train with onnxtrain.torch.TrainableModule"
        )


def last_report(model: ir.Model) -> ExportReport:
    """Return the report of a model from :func:`from_torch`."""
    return model.meta[_REPORT]


def export_module(
    module: nn.Module,
    inputs: tuple[Any, ...],
    names: Sequence[str],
    axes: Axes,
    *,
    train: bool | None,
    label: str,
) -> ir.Model:
    """Return the first export that matches the module; error messages call the module ``label``."""
    rejected: list[str] = []
    with _restore_modes(module), torch.random.fork_rng(devices=[]):
        if train is not None:
            module.train(train)
        paddings = _embedding_paddings(module, inputs, label)
        longer, fixed = longer_inputs(module, inputs, axes, train)
        if fixed:
            axes = [{axis: n for axis, n in a.items() if n not in fixed} for a in axes]
            reasons = ", ".join(f"{size} ({error})" for size, error in fixed.items())
            logger.warning("%s has fixed sizes, it does not run with others: %s", label, reasons)
        for name, exporter in (("dynamo", exporters.dynamo), ("legacy", exporters.legacy)):
            try:
                model, repairs = _try_export(exporter, module, inputs, names, axes, train, paddings)
                initializer_of = _parameter_names(module, model, inputs)
                check(module, model, inputs, names, longer, train, initializer_of)
            except ExportError as error:
                rejected.append(f"{name}: {error}")
                continue
            except Exception as error:  # exporters raise any exception of torch's internals
                rejected.append(f"{name}: {_error_text(error)}")
                continue
            model.meta[_REPORT] = ExportReport(
                name, tuple(repairs), tuple(rejected), initializer_of, fixed
            )
            _record_aliases(model, initializer_of)
            return model
    raise ExportError(
        f"cannot export {label}:\n  " + "\n  ".join(rejected) + "\n"
        "hint: rewrite the operations named above, or export a submodule"
    )


def _try_export(
    exporter: Callable[..., ir.Model],
    module: nn.Module,
    inputs: Sequence[Any],
    names: Sequence[str],
    axes: Axes,
    train: bool | None,
    paddings: Mapping[str, Sequence[int]],
) -> tuple[ir.Model, list[str]]:
    if train is not None:
        module.train(train)
    # Exporters may change the mode; the repairs below read it.
    with restore_statistics(module), _restore_modes(module):
        model = exporter(module, inputs, names, axes)
    restore_buffers(module, model)
    masks = fix_masked_rows(model)
    repairs = [f"fully masked attention rows set to zero: {masks} mask(s)"] if masks else []
    padded = block_padding_gradients(model, paddings)
    if padded:
        repairs.append(f"rows of padding_idx get no gradient: {padded} embedding(s)")
    if any(submodule.training for submodule in module.modules()):
        return model, [*repairs, *set_training_mode(module, model)]
    to_evaluation(model)
    return model, repairs


def _embedding_paddings(
    module: nn.Module, inputs: Sequence[Any], label: str
) -> dict[str, list[int]]:
    """Return the ``padding_idx`` of each embedding call, by the parameter that it looks up.

    Raises:
        ExportError: an embedding changes its table or scales its gradient by counts.
    """
    # max_norm changes tables in the forward pass.
    saved = {n: p.detach().clone() for n, p in module.named_parameters() if _is_renormed(module, n)}
    with torch.no_grad(), restore_statistics(module), EmbeddingCalls() as calls:
        module(*detached_copy(inputs))
    with torch.no_grad():
        for name, value in saved.items():
            module.get_parameter(name).copy_(value)
    if calls.unsupported:
        raise ExportError(
            f"cannot export {label}: an embedding uses {' and '.join(sorted(calls.unsupported))}, "
            "which ONNX cannot express\nhint: create the embedding without it"
        )
    if calls.bags:
        raise ExportError(
            f"cannot export {label}: an EmbeddingBag uses {' and '.join(sorted(calls.bags))}, "
            "which torch exports to nodes that onnxruntime does not run\n"
            "hint: nn.Embedding, then .mean(1) or .sum(1)"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {n: found for key, found in calls.paddings.items() for n in names.get(key, ())}


def _is_renormed(module: nn.Module, name: str) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    return getattr(owner, "max_norm", None) is not None


def _parameter_names(module: nn.Module, model: ir.Model, inputs: Sequence[Any]) -> dict[str, str]:
    """Return the initializer of each parameter; raise if the exporter lost one."""
    initializers = model.graph.initializers
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    lost: list[str] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        initializer = next((n for n in shared[id(parameter)] if n in initializers), None)
        if initializer is None:
            lost.append(name)
        else:
            names[name] = initializer
    # Exporters drop parameters that no output depends on; add them back unused.
    if lost and ignores_parameters(module, inputs, lost):
        for name in lost:
            at = shared[id(module.get_parameter(name))][0]
            if at not in initializers:
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
        lost: list[str] = []
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ExportError(f"the export lost parameters: {', '.join(lost[:5])}{more}")
    return names


def _record_aliases(model: ir.Model, initializer_of: Mapping[str, str]) -> None:
    aliases: dict[str, list[str]] = {}
    for name, initializer in initializer_of.items():
        if name != initializer:
            aliases.setdefault(initializer, []).append(name)
    if aliases:
        model.metadata_props[ALIASES] = json.dumps(aliases, sort_keys=True)


def rename_initializers(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Rename initializers in place, and their names in the model's metadata."""
    graph, metadata = model.graph, model.metadata_props
    for name in list(graph.initializers):
        if new_name(name) != name:
            value = graph.initializers.pop(name)
            value.name = new_name(name)
            graph.register_initializer(value)
    for key in (PARAMETERS, FROZEN):
        if key in metadata:
            metadata[key] = json.dumps(sorted(map(new_name, json.loads(metadata[key]))))
    if ALIASES in metadata:
        tied = {new_name(n): [new_name(x) for x in xs] for n, xs in aliases_of(model).items()}
        metadata[ALIASES] = json.dumps(tied, sort_keys=True)


@contextlib.contextmanager
def _restore_modes(module: nn.Module) -> Iterator[None]:
    """Restore the training mode of every submodule on exit."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    try:
        yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


def _error_text(error: BaseException) -> str:
    """Return the root cause: exporters wrap it in advice for their own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Example inputs in order, with their names and symbolic axes."""

    module: nn.Module
    """The module, or a wrapper that takes its keyword arguments by position."""
    inputs: tuple[Any, ...]
    names: list[str]
    axes: Axes


class _PositionalModule(nn.Module):
    """A module that takes its keyword arguments by position, with the same parameter names."""

    def __init__(self, module: nn.Module, keywords: Sequence[str]) -> None:
        super().__init__()
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = module._modules
        # Bypass nn.Module.__setattr__: registering a submodule would prefix the parameter names.
        self.__dict__["_module"], self.__dict__["_keywords"] = module, tuple(keywords)
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training" and "_module" in self.__dict__:
            self.__dict__["_module"].training = value

    def forward(self, *tensors: Any) -> Any:
        keywords: tuple[str, ...] = self.__dict__["_keywords"]
        return self.__dict__["_module"](**dict(zip(keywords, tensors, strict=True)))


def _resolve_arguments(
    module: nn.Module,
    example: Any,
    names: Sequence[str] | None,
    dynamic_shapes: Any,
    dynamic_batch: bool,
) -> Arguments:
    """Return the arguments of an example: a tensor, a tuple, or a dict of keyword arguments.

    Raises:
        ExportError: if names or ``dynamic_shapes`` do not match the inputs.
    """
    if isinstance(example, Mapping):
        keywords = [str(key) for key in example]
        inputs, wrapper = tuple(example.values()), _PositionalModule(module, keywords)
        _check_keywords(module, keywords)
    else:
        inputs = example if isinstance(example, tuple) else (example,)
        keywords, wrapper = _positional_names(module, len(inputs)), module
    inputs = detached_copy(inputs)
    labels = list(names) if names is not None else keywords
    _check_names(labels, len(inputs), "inputs")
    if isinstance(dynamic_shapes, Mapping):
        unknown = sorted(set(dynamic_shapes) - set(keywords) - set(labels))
        if unknown:
            raise ExportError(
                f"dynamic_shapes: unknown input {unknown[0]!r} "
                f"{expected_one_of(unknown[0], labels)}"
            )
        both = zip(keywords, labels, strict=True)
        dynamic_shapes = [dynamic_shapes.get(k, dynamic_shapes.get(n)) for k, n in both]
    if dynamic_shapes is None:
        axes = _batch_axes(inputs) if dynamic_batch else [{} for _ in inputs]
    else:
        axes = [dict(a or {}) for a in dynamic_shapes]
    if len(axes) != len(inputs):
        raise ExportError(f"dynamic_shapes has {len(axes)} entries for {len(inputs)} inputs")
    return Arguments(wrapper, inputs, labels, axes)


def _check_keywords(module: nn.Module, keywords: Sequence[str]) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise ExportError(
            f"example_inputs does not match {type(module).__name__}.forward: {error}\n"
            f"hint: its arguments are {', '.join(signature.parameters)}"
        ) from error


def _check_names(names: Sequence[str], count: int, what: str) -> None:
    if len(names) != count:
        raise ExportError(f"got {len(names)} names for {count} {what}")
    duplicates = sorted({n for n in names if list(names).count(n) > 1})
    if duplicates:
        raise ExportError(f"duplicate name in {what}: {duplicates[0]!r}\nhint: pass unique names")
    if not all(names):
        raise ExportError(f"the names of {what} contain an empty string")


def _positional_names(module: nn.Module, count: int) -> list[str]:
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return parameters[:count] if len(parameters) >= count else [f"input_{i}" for i in range(count)]


def _batch_axes(inputs: Sequence[Any]) -> list[dict[int, str]]:
    """Name the first axes; equal sizes in the example share a name."""
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


def _name_outputs(
    model: ir.Model, requested: Sequence[str] | None, module: nn.Module, inputs: Sequence[Any]
) -> None:
    """Name the outputs of the model, by default as the module names them.

    Raises:
        ExportError: if the number of names is wrong, or an input or parameter has the name.
    """
    from_module = requested is None
    names = _module_output_names(module, inputs) if from_module else list(requested)
    outputs = model.graph.outputs
    if names is None or (from_module and len(names) != len(outputs)):
        return
    _check_names(names, len(outputs), "outputs")
    op = OpBuilder(model.graph, "output/")
    fixed = {*(x.name for x in model.graph.inputs), *model.graph.initializers}
    conflicts = sorted(fixed.intersection(names))
    if conflicts and not from_module:
        raise ExportError(
            f"output_names contains {conflicts[0]!r}, the name of an input or parameter"
        )
    names = [f"{n}.out" if n in fixed else n for n in names]
    for i, y in enumerate(outputs):
        if y.producer() is None or any(y is x for x in outputs[:i]):
            outputs[i] = op.Identity(y)
            outputs[i].type, outputs[i].shape = y.type, y.shape
    reserved = set(names)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in reserved:
                value.name = op.names.fresh(f"{value.name}.inner")
    for y, name in zip(outputs, names, strict=True):
        y.name = name


def _module_output_names(module: nn.Module, inputs: Sequence[Any]) -> list[str] | None:
    """Return the keys of the dict, or the fields of the named tuple, that the module returns."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restore_statistics(module):
        result = module(*inputs)
    if isinstance(result, Mapping):
        items = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        items = list(zip(result._fields, result, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        return None
    names: list[str] = []
    for key, value in items:
        count = len(flatten_tensors(value))
        names += [key] if count == 1 else [f"{key}_{i}" for i in range(count)]
    return names
