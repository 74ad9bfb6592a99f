"""A model run beside the module it was exported from, dropout aside."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onnxtrain.autodiff.gradients import lift
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.modes import to_evaluation
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.exporters import Axes, ExportError
from onnxtrain.torch.repairs import flatten_tensors, gradients_and_stops, require_same_gradients

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_DROPOUT_FUNCTIONS = (
    torch.dropout,
    torch.feature_dropout,
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.feature_alpha_dropout,
    nn.functional.alpha_dropout,
)
_TOLERANCE = 1e-3
"""Largest difference to torch that counts as rounding, relative to the largest output."""


def check(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    axes: Axes,
    train: bool | None,
    stored: dict[str, str],
) -> None:
    """Compare with torch, dropout aside: in evaluation mode, and in the mode that was asked for."""
    modes = [(part, part.training) for part in module.modules()]
    plain = model.clone()
    to_evaluation(plain)
    if train is not None or not any(mode for _, mode in modes):
        module.eval()
        _compare(module, plain, inputs, names, axes, "evaluation mode")
    if train is False:
        return
    for part, mode in modes:
        part.training = mode
    if any(mode for _, mode in modes):
        with restore_statistics(module), _no_dropout(module):
            work = model.clone()
            _remove_dropout(work)
            _compare(module, work, inputs, names, axes, "training mode")
        _require_statistics(module, model, inputs)
    if any(t.requires_grad for t in (*module.parameters(), *flatten_tensors(inputs))):
        with restore_statistics(module), _no_dropout(module):
            work = model.clone()
            _remove_dropout(work)
            _check_gradients(module, work, inputs, names, stored)


def _require_statistics(module: nn.Module, model: ir.Model, inputs: Sequence[Any]) -> None:
    """Refuse a model that leaves running statistics alone which torch changes."""
    norms: dict[str, Any] = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, BATCH_NORMS) and part.training and part.running_mean is not None
    }
    before = {name: part.running_mean.clone() for name, part in norms.items()}
    with torch.no_grad(), restore_statistics(module), _no_dropout(module):
        module(*copy.deepcopy(tuple(inputs)))
        changed = [n for n, part in norms.items() if not part.running_mean.equal(before[n])]
    updated = {
        mean.name
        for node in nodes(model.graph, "BatchNormalization", subgraphs=True)
        if (mean := node.inputs[3]) is not None
        and (mode := node.attributes.get("training_mode")) is not None
        and mode.as_int()
    }
    # A part that bears two names is stored under either.
    missing = [
        n
        for n in changed
        if not any(
            f"{other}.running_mean" in updated
            for other, part in module.named_modules(remove_duplicate=False)
            if part is norms[n]
        )
    ]
    if missing:
        raise ExportError(
            f"training mode: running statistics of {', '.join(missing[:5])} would stay as they are"
        )


def _check_gradients(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    stored: dict[str, str],
) -> None:
    want, seeds, why = gradients_and_stops(module, inputs, names, stored)
    if not want:
        return
    feeds = {
        n: x.detach().cpu().numpy()
        for n, x in zip(names, inputs, strict=True)
        if isinstance(x, torch.Tensor)
    }
    try:
        require_same_gradients(model, feeds, want, seeds, why)
    except UndifferentiableError:
        return  # whoever wants the gradient will be told


def _compare(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    axes: Axes,
    mode: str,
) -> None:
    # As inputs, since onnxruntime folds a BatchNorm into the convolution before it even if it is in
    # training mode, once all weights are constants; as copies, since it writes the new running
    # statistics over the old ones.
    work = model.clone()
    weights = [x for x in work.graph.initializers.values() if S.is_float(x)]
    values = {x.name or "": x.const_value.numpy() for x in weights if x.const_value is not None}
    lift(work.graph, weights)
    session = runtime.create(ir.to_proto(work).SerializeToString(), threads=1)
    known = {i.name for i in session.get_inputs()}
    sizes = [inputs, _one_more_row(inputs, axes)] if any(0 in a for a in axes) else [inputs]
    for batch in sizes:
        with torch.no_grad(), restore_statistics(module):
            try:
                want = flatten_tensors(module(*copy.deepcopy(tuple(batch))))
            except Exception:
                if batch is inputs:
                    raise
                return  # the module itself takes no other size
        feeds = {n: np.array(v) for n, v in values.items() if n in known}
        feeds |= {
            n: x.detach().cpu().numpy()
            for n, x in zip(names, batch, strict=True)
            if n in known and isinstance(x, torch.Tensor)
        }
        got = runtime.run(session, None, feeds)
        _require_equal(want, got, mode if batch is inputs else f"{mode}, one more row")


def _require_equal(want: Sequence[torch.Tensor], got: Sequence[np.ndarray], mode: str) -> None:
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
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(b)):
            raise ExportError(f"{mode}: output {i} is infinite or NaN at other places than torch's")
        scale = max(float(np.abs(x[finite]).max(initial=0.0)), 1e-6)
        difference = np.abs(x[finite].astype(np.float64) - b[finite])
        worst = float(difference.max(initial=0.0)) / scale
        if not worst <= _TOLERANCE:
            raise ExportError(f"{mode}: output {i} differs from torch by {worst:.2g} of its size")


def _one_more_row(inputs: Sequence[Any], axes: Axes) -> Sequence[Any]:
    """Return the inputs with one more row on the axis that the first symbolic one stands for."""
    size = next(a[0] for a in axes if 0 in a)
    return tuple(
        torch.cat([x, x[:1]]) if a.get(0) == size else x for x, a in zip(inputs, axes, strict=True)
    )


def ignores_parameters(module: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> bool:
    """Return whether the forward pass ignores these parameters: NaN in them changes nothing."""

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad(), restore_statistics(module), _no_dropout(module):
            return flatten_tensors(module(*copy.deepcopy(tuple(inputs))))

    parameters = [module.get_parameter(n) for n in names]
    before = outputs()
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                p.fill_(float("nan"))
        after = outputs()
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
def restore_statistics(module: nn.Module) -> Iterator[None]:
    """Put running statistics back after forward passes in training mode."""
    saved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])


class _NoDropout(TorchFunctionMode):
    """Turns calls of dropout functions into the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention and kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **(kwargs or {}))


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
        with _NoDropout():
            yield
    finally:
        for part, name, value in saved:
            setattr(part, name, value)
