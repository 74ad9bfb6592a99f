"""What a module takes and gives, by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.torch.checking import untracked
from onnxtrain.torch.stop_gradient import flat
from onnxtrain.torch.torch_exporters import Axes, ExportError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Example inputs in order, with their names and symbolic axes."""

    module: nn.Module
    """The module itself, or a view of it that takes keywords by position."""
    inputs: tuple[Any, ...]
    names: list[str]
    axes: Axes


class _ByPosition(nn.Module):
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
        inputs, view = tuple(example.values()), _ByPosition(module, keywords)
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
    names = _own_names(module, inputs) if own else list(given)
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


def _own_names(module: nn.Module, inputs: Sequence[Any]) -> list[str] | None:
    """Return the keys of the dict, or the fields of the named tuple, that the module gives."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), untracked(module):
        result = module(*inputs)
    if isinstance(result, Mapping):
        parts = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        parts = list(zip(result._fields, result, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        return None
    names: list[str] = []
    for key, value in parts:
        count = len(flat(value))
        names += [key] if count == 1 else [f"{key}_{i}" for i in range(count)]
    return names


__all__ = ["Arguments", "arguments_of", "name_outputs"]
