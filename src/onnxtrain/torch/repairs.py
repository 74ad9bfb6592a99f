"""Rows of attention that see no key: zeros, as torch has it.

torch's exporter writes a mask of booleans as zeros and lowest numbers, so that such a row is the
mean of all values, and puts a guard against NaN behind the softmax that never sees one. With minus
infinities it does, and gives zeros. Batches that are filled up on the left have such rows.

Gradients that torch stops or bends, of which an exported graph knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onnxtrain.autodiff.gradients import parameters as values_of
from onnxtrain.autodiff.gradients import vjp
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nan_guard, nodes
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.exporters import ExportError


def fix_masked_rows(model: ir.Model) -> int:
    """Write minus infinity for the lowest number in masks of guarded softmaxes; return how often.

    Only where nothing else reads a mask.
    """
    op, closed = OpBuilder(model.graph, "mask/"), 0
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
            closed += 1
    return closed


def _is_guarded(add: ir.Node) -> bool:
    """Return whether a sum is what a softmax reads whose NaN become zeros."""
    readers = [use.node for use in add.outputs[0].uses()]
    if not is_op(add, "Add") or len(readers) != 1 or not is_op(readers[0], "Softmax"):
        return False
    return nan_guard(readers[0].outputs[0]) is not None


_TOLERANCE = 1e-2
_DATA: Any = torch.Tensor.data
_DETACH_FUNCTIONS = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, _DATA.__get__)


class _DetachRecorder(TorchFunctionMode):
    """Notes calls that cut a tensor off from its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DETACH_FUNCTIONS:
            self.stops.add("detach")
        elif func is torch._C._set_grad_enabled and args and not args[0]:
            self.stops.add("no_grad")
        return func(*args, **(kwargs or {}))


def gradients_and_stops(
    module: nn.Module, inputs: Sequence[Any], names: Sequence[str], stored: dict[str, str]
) -> tuple[dict[str, np.ndarray], list[np.ndarray], set[str]]:
    """Return torch's gradients, the cotangents used, and what bent the gradient.

    The gradients are those of the parameters, by initializer, and of inputs that require one.
    """
    generator = np.random.default_rng(0)
    leaves = _leaves(inputs)
    with torch.enable_grad(), _DetachRecorder() as watch:
        outputs = [y for y in flatten_tensors(module(*leaves)) if y.is_floating_point()]
    seeds = [generator.standard_normal(tuple(y.shape)).astype(_dtype(y)) for y in outputs]
    if any(_has_own_function(y) for y in outputs):
        watch.stops.add("autograd.Function")
    if not watch.stops:
        return {}, [], set()
    chosen = {stored[n]: p for n, p in module.named_parameters() if p.requires_grad}
    chosen |= {
        n: x
        for n, x in zip(names, leaves, strict=True)
        if isinstance(x, torch.Tensor) and x.requires_grad
    }
    live = [(y, s) for y, s in zip(outputs, seeds, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in live],
        list(chosen.values()),
        [torch.from_numpy(s).to(y) for y, s in live],
        allow_unused=True,
    )
    grads = {
        n: (torch.zeros_like(p) if g is None else g).detach().cpu().numpy()
        for (n, p), g in zip(chosen.items(), gradients, strict=True)
    }
    return grads, seeds, watch.stops


def require_same_gradients(
    model: ir.Model,
    feeds: dict[str, np.ndarray],
    want: dict[str, np.ndarray],
    seeds: Sequence[np.ndarray],
    why: set[str],
) -> None:
    """Compare our gradients with torch's.

    Raises:
        ExportError: if they differ.
    """
    gradient = vjp(model, list(want))
    session = runtime.create(gradient.SerializeToString(), threads=1)
    inputs = [i.name for i in session.get_inputs()]
    values = {**values_of(model, list(want)), **feeds}
    cotangents = inputs[len(inputs) - len(seeds) :]
    values |= dict(zip(cotangents, seeds, strict=True))
    names = [o.name for o in session.get_outputs()][-len(want) :]
    got = runtime.run(session, names, {n: values[n] for n in inputs})
    scale = max(float(np.abs(g).max(initial=0.0)) for g in want.values())
    for (name, g), h in zip(want.items(), got, strict=True):
        worst = float(np.abs(g - h).max(initial=0.0))
        if not worst <= _TOLERANCE * max(scale, 1e-6):
            raise ExportError(
                f"the gradient of {name!r} is another one in torch, which uses "
                f"{' and '.join(sorted(why))}: the graph has no way to say that"
            )


def flatten_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dicts."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return (
        [t for o in outputs for t in flatten_tensors(o)]
        if isinstance(outputs, list | tuple)
        else []
    )


def _leaves(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs
    )


def _dtype(y: torch.Tensor) -> Any:
    return torch.empty((), dtype=y.dtype).numpy().dtype


def _has_own_function(y: torch.Tensor) -> bool:
    """Return whether an autograd.Function stands between the parameters and an output."""
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        waiting += [parent for parent, _ in node.next_functions]
    return False
