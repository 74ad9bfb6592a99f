"""The arguments and results of a module's call as flat tensors, with all else apart.

A session takes and returns tensors. ``FlatArguments`` and ``FlatResults`` remember the structure
around them; ``FlatModule`` is the module as a function from tensors to tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onnxtrain.errors import OnnxTrainError
from onnxtrain.torch.checking import (
    detached_copy,
    flatten_tensors,
    longer_inputs,
    restore_statistics,
)
from onnxtrain.torch.exporters import ExportError
from onnxtrain.torch.repairs import BATCH_NORMS

logger = logging.getLogger(__name__)
INNER_PREFIX = "inner."
"""Of the names of parameters and buffers in a :class:`FlatModule`."""
_CONSTANTS = (type(None), int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
"""Types of results that stay as the example call returned them; ``bool`` is an ``int``."""


@dataclasses.dataclass(frozen=True)
class FlatArguments:
    """The flattened arguments of one call: tensors and other leaves."""

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    """All leaves in order, with ``None`` in place of the tensors."""
    positions: tuple[int, ...]
    """Indices of the tensors in ``leaves``."""
    structure: Any
    structure_key: Any
    """Hashable form of everything except the tensors."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatArguments:
        """Flatten the arguments of a call."""
        if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            return cls(args, *_only_tensors(len(args)))
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        positions = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
        others = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        return cls(
            tuple(leaves[i] for i in positions),
            others,
            positions,
            structure,
            _structure_key(others, positions, structure),
        )

    @property
    def kind(self) -> Any:
        """Key of calls that can share an export: everything except tensor values and sizes."""
        tensors = tuple((t.dim(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        return tensors, self.structure_key

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the same structure with other tensors."""
        leaves = list(self.leaves)
        for position, t in zip(self.positions, tensors, strict=True):
            leaves[position] = t
        return pytree.tree_unflatten(leaves, self.structure)


@functools.lru_cache(maxsize=64)
def _only_tensors(count: int) -> tuple[Any, ...]:
    """Return the other fields for a call with ``count`` positional tensors, the usual case."""
    leaves, positions = (None,) * count, tuple(range(count))
    structure = pytree.tree_structure((leaves, {}), is_leaf=lambda x: x is None)
    return leaves, positions, structure, _structure_key(leaves, positions, structure)


def _structure_key(leaves: tuple[Any, ...], positions: tuple[int, ...], structure: Any) -> Any:
    values = tuple(x if isinstance(x, bool | int | float | str) else repr(x) for x in leaves)
    return tuple(map(type, leaves)), values, positions, str(structure)


@dataclasses.dataclass(frozen=True)
class FlatResults:
    """What a module returns and changes: tensors, and what is around them."""

    leaves: tuple[Any, ...]
    """All leaves in order, with ``None`` in place of the tensors."""
    positions: tuple[int, ...]
    """Indices of the tensors in ``leaves``."""
    structure: Any
    changed: tuple[int, ...]
    """Indices of the tensors among the arguments that the module changes in place."""
    buffers: tuple[str, ...]
    """Buffers that the module changes, without running statistics of BatchNorm."""

    @classmethod
    def of(cls, module: nn.Module, call: FlatArguments) -> FlatResults:
        """Run the module on copies of the arguments.

        Raises:
            ExportError: if it returns a number that depends on the arguments.
        """
        tensors, attributes = detached_copy(call.tensors), _tensor_attributes(module)
        leaves, structure, buffers = _run(module, call, tensors)
        kind = type(module).__name__
        new = [n for n, t in _tensor_attributes(module).items() if attributes.get(n) is not t]
        if new:
            logger.warning(
                "%s sets attributes in forward that are not computed on ONNX Runtime: %s; "
                "return them",
                kind,
                ", ".join(new),
            )
        changed = (i for i, t in enumerate(tensors) if not t.is_inference() and t._version)
        if any(isinstance(x, int | float) for x in leaves):
            _check_numbers(module, call, leaves)
        return cls(
            tuple(_constant(x, kind) for x in leaves),
            tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)),
            structure,
            tuple(changed),
            tuple(buffers),
        )

    @property
    def count(self) -> int:
        """Outputs of a :class:`FlatModule`."""
        return len(self.positions) + len(self.changed) + len(self.buffers)

    def protected(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return copies of the tensors to change: the backward pass may read the old values."""
        if not self.changed:
            return tensors
        return [t.clone() if i in self.changed else t for i, t in enumerate(tensors)]

    def restore(self, outputs: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> Any:
        """Change the arguments as the module does; return the outputs in its structure."""
        count = len(self.positions)
        for i, new in zip(self.changed, outputs[count:], strict=True):
            arguments[i].copy_(new)
        leaves = list(self.leaves)
        for position, t in zip(self.positions, outputs[:count], strict=True):
            leaves[position] = t
        return pytree.tree_unflatten(leaves, self.structure)


def _run(
    module: nn.Module, call: FlatArguments, tensors: Sequence[torch.Tensor]
) -> tuple[list[Any], Any, list[str]]:
    """Return the leaves and structure of the results, and the buffers that changed."""
    before = {n: (b, b._version) for n, b in module.named_buffers() if not b.is_inference()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restore_statistics(module):
        args, kwargs = call.arguments(tensors)
        leaves, structure = pytree.tree_flatten(module(*args, **kwargs))
        buffers = dict(module.named_buffers())
        changed = [
            n
            for n, (b, version) in before.items()
            if (buffers[n] is not b or b._version != version) and not _is_batch_norm(module, n)
        ]
    return leaves, structure, changed


def _tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors that are attributes of submodules, not parameters or buffers."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, submodule in module.named_modules()
        for key, value in vars(submodule).items()
        if isinstance(value, torch.Tensor)
    }


def stateful_buffers(module: nn.Module, inputs: Sequence[Any]) -> list[str]:
    """Return the buffers that a call changes and that the results of the next call depend on."""
    call = FlatArguments.of(tuple(inputs), {})
    _, _, changed = _run(module, call, detached_copy(call.tensors))
    if not changed:
        return []
    results: list[list[torch.Tensor]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restore_statistics(module):
        for _ in range(2):
            torch.manual_seed(0)
            results.append([y.clone() for y in flatten_tensors(module(*detached_copy(inputs)))])
    return [] if all(map(torch.equal, *results)) else changed


def _is_batch_norm(module: nn.Module, buffer: str) -> bool:
    return isinstance(module.get_submodule(buffer.rpartition(".")[0]), BATCH_NORMS)


def _constant(leaf: Any, module: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return None
    return leaf if isinstance(leaf, _CONSTANTS) else NotReturned(module, type(leaf).__name__)


class NotReturned:
    """Placeholder of an object that a module returns and a session cannot; reading it raises."""

    def __init__(self, module: str, kind: str) -> None:
        self.__dict__.update(_module=module, _kind=kind)

    def __repr__(self) -> str:
        return f"<{self.__dict__['_kind']}, which ONNX Runtime does not return>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module, kind = self.__dict__["_module"], self.__dict__["_kind"]
        raise OnnxTrainError(
            f"{module} returns a {kind}, whose {name!r} is not computed on ONNX Runtime\n"
            f"hint: return tensors, or register {kind} with torch.utils._pytree"
        )


def _check_numbers(module: nn.Module, call: FlatArguments, leaves: Sequence[Any]) -> None:
    """Raise if a number among the results differs for other values or sizes of the arguments."""
    for tensors in _others(module, call):
        try:
            others, _, _ = _run(module, call, detached_copy(tensors))
        except Exception:  # a module raises any exception for values that it does not take
            continue
        for x, y in zip(leaves, others, strict=False):
            if isinstance(x, int | float) and x != y and not math.isnan(x):
                raise ExportError(
                    f"{type(module).__name__} returns a number that depends on its inputs: {x!r}, "
                    f"and {y!r} for others\n"
                    "hint: return a tensor, or compute the number outside of forward"
                )


def _others(module: nn.Module, call: FlatArguments) -> Iterator[Sequence[torch.Tensor]]:
    """Yield arguments with other values, and with another value of each size."""
    yield [t / 2 if t.is_floating_point() else torch.zeros_like(t) for t in call.tensors]
    axes = [{i: f"{size}" for i, size in enumerate(t.shape)} for t in call.tensors]
    longer, _ = longer_inputs(FlatModule(module, call), call.tensors, axes, None)
    yield from longer.values()


class FlatModule(nn.Module):
    """The module as a function from tensors to tensors; what it changes comes last."""

    def __init__(
        self, module: nn.Module, call: FlatArguments, results: FlatResults | None = None
    ) -> None:
        super().__init__()
        self.inner, self.call = module, call
        self.changed = results.changed if results else ()
        self.changed_buffers = results.buffers if results else ()
        self.training = module.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the module returns, then the arguments and buffers it changes."""
        tensors = tuple(t.clone() if i in self.changed else t for i, t in enumerate(tensors))
        args, kwargs = self.call.arguments(tensors)
        leaves = pytree.tree_leaves(self.inner(*args, **kwargs))
        outputs = [x for x in leaves if isinstance(x, torch.Tensor)]
        buffers = dict(self.inner.named_buffers())
        changed = [tensors[i] for i in self.changed]
        changed += [buffers[n].clone() for n in self.changed_buffers]
        return (*outputs, *changed)
