"""Losses of torch, and losses written with torch, as losses of onnxtrain."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.autodiff.gradients import vjp
from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import LOSSES, Loss, TargetSpec
from onnxtrain.losses.from_model import insert_model
from onnxtrain.losses.loss import labels_for, target_like
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.export import from_torch

_BY_CLASS = {f"{LOSSES[name].__name__}Loss": LOSSES[name] for name in LOSSES}
_BY_FUNCTION = {
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
}
_ATTRIBUTES_OF_MODULES = set(nn.Module().__dict__) | {"weight", "pos_weight"}
_TOLERANCE = 1e-4
_TYPE = re.compile(r"(\w+)\[(.*)\]")


def from_torch_loss(loss: Callable[..., Any], *, targets: Mapping[str, str] | None = None) -> Loss:
    """Return a loss module or function of torch, or one of your own, as a loss for ``build``.

    ``build(..., loss=)`` calls it for modules of torch, and for functions that use torch or have
    ``torch.Tensor`` in their signature.

    A loss of torch becomes the loss of onnxtrain that equals it:

    >>> from_torch_loss(nn.CrossEntropyLoss(label_smoothing=0.1)).label_smoothing
    0.1

    Everything else is exported, and its values and gradients are compared with torch's. The first
    argument is the output of the model, the others become inputs: ``labels`` are class indices,
    any other argument has the shape and type of the output.

    >>> def focal(logits, labels):
    ...     ce = nn.functional.cross_entropy(logits, labels, reduction="none")
    ...     return ((1 - torch.exp(-ce)) ** 2 * ce).mean()
    >>> model = onnxtrain.examples.digits_model()
    >>> artifacts = onnxtrain.build(model, loss=from_torch_loss(focal), optimizer="adamw")
    >>> [(x.name, x.shape) for x in artifacts.manifest.models[0].inputs_of("target")]
    [('labels', ('batch',))]

    Args:
        loss: a module, or a function that takes and returns tensors.
        targets: types of arguments, in the notation of ONNX: ``{"mask": "float[batch, 10]"}``.

    Raises:
        PrepareError: the module has trainable parameters; those of a loss do not train.
    """
    known = _known_loss(loss)
    if known is not None and not targets:
        return known
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        names = ", ".join(n for n, p in loss.named_parameters() if p.requires_grad)
        raise PrepareError(
            f"{type(loss).__name__} has parameters, which a loss does not train: {names}\n"
            "hint: export them as part of the model, or call requires_grad_(False)"
        )
    return TorchLoss(function=loss, types=dict(targets or {}))


def _known_loss(loss: Callable[..., Any]) -> Loss | None:
    """Return the loss of onnxtrain that equals a loss of torch, with the same options."""
    if isinstance(loss, functools.partial) and not loss.args:
        function, given = loss.func, dict(loss.keywords)
    elif isinstance(loss, nn.Module):
        return _known_module(loss)
    else:
        function, given = loss, {}
    name = getattr(function, "__name__", "")
    if getattr(nn.functional, name, None) is not function:
        return None
    kind = LOSSES.find(_BY_FUNCTION.get(name, name.removesuffix("_loss")))
    if kind is None or not given.keys() <= {f.name for f in dataclasses.fields(kind)}:
        return None
    return kind(**{n: _plain(v) for n, v in given.items()})


def _known_module(loss: nn.Module) -> Loss | None:
    name = type(loss).__name__
    kind = _BY_CLASS.get(name) if type(loss).__module__.startswith("torch.nn.") else None
    if kind is None:
        return None
    fields = {f.name for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {n: v for n, v in vars(loss).items() if not n.startswith("_")}
    given |= {n: v for n, v in loss.named_buffers() if v is not None}
    plain = type(loss)()
    options: dict[str, Any] = {}
    for option, value in given.items():
        if option in fields:
            options[option] = _plain(value)
        elif option not in _ATTRIBUTES_OF_MODULES and value != getattr(plain, option, None):
            return None
    return kind(**options)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchLoss(Loss):
    """A function over tensors, which is exported with the shapes of the model it is added to."""

    function: Callable[..., Any]
    types: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    _exports: dict[str, ir.Model] = dataclasses.field(
        default_factory=dict[str, ir.Model], init=False, repr=False, compare=False
    )

    @property
    def label(self) -> str:
        """The name of the function or of the module's class."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments without a default."""
        forward = getattr(self.function, "forward", self.function)
        parameters = inspect.signature(forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the arguments after the first."""
        _, *names = self.arguments
        unknown = self.types.keys() - names
        if unknown:
            raise PrepareError(
                f"{self.label} has no target {', '.join(sorted(unknown))}\n"
                f"hint: its targets are {', '.join(names)}"
            )
        return [self._target(name, prediction) for name in names]

    def _target(self, name: str, prediction: ir.Value) -> TargetSpec:
        if name not in self.types:
            labels = name == "labels" and S.rank_of(prediction) > 1
            return labels_for(name, prediction, 1) if labels else target_like(name, prediction)
        match = _TYPE.fullmatch(self.types[name].replace(" ", ""))
        dtype = None if match is None else ir.DataType.__members__.get(match[1].upper())
        if match is None or dtype is None:
            raise PrepareError(
                f"{self.label}: not a type of a target: {self.types[name]!r}\n"
                f'hint: for example targets={{"{name}": "int64[batch]"}}'
            )
        dims = tuple(int(d) if d.isdigit() else d for d in match[2].split(",") if d)
        return TargetSpec(name, dtype, dims)

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Export the function for these arguments, compare it with torch and copy its nodes."""
        values = [_long(op, x) for x in (prediction, *targets)]
        key = str([(x.dtype, S.dims_of(x)) for x in values])
        if key not in self._exports:
            self._exports[key] = self._exported(values)
        owner = ir.Model(op.graph, ir_version=10)
        return insert_model(owner, op, self._exports[key], [], values)

    def _exported(self, values: Sequence[ir.Value]) -> ir.Model:
        module = type(self.label, (_Module,), {})(self.function)  # errors name its class
        batches = [b for b in _examples(values) if _is_finite(module, b)]
        if not batches:
            raise PrepareError(self._failure(module, values, next(_examples(values))))
        names = [f"x{i}" for i in range(len(values))]
        model = from_torch(
            module,
            batches[0],
            train=None,
            input_names=names,
            dynamic_shapes=[_symbols(x) for x in values],
        )
        _check_gradients(self.label, module, model, batches, names)
        return model

    def _failure(
        self, module: nn.Module, values: Sequence[ir.Value], example: Sequence[torch.Tensor]
    ) -> str:
        shapes = ", ".join(map(S.describe_value, values))
        reason = "its value is not finite for random arguments"
        try:
            y = module(*example)
            if not isinstance(y, torch.Tensor) or not y.is_floating_point():
                reason = f"it returns {type(y).__name__}, not a tensor of floats"
        except Exception as error:  # any exception of the user's function
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        name = self.arguments[-1]
        return (
            f"the loss {self.label} does not accept {shapes}: {reason}\n"
            f"hint: from_torch_loss({self.label}, "
            f'targets={{"{name}": "int64[batch]"}}) sets the type of a target'
        )


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.function(*values)


def _long(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return an input of integers as int64, torch's type of labels; they are int32 on WebGPU."""
    return op.cast(x, ir.DataType.INT64) if x.dtype == ir.DataType.INT32 else x


def _symbols(x: ir.Value) -> dict[int, str]:
    """Return the symbolic axes of a value, with identifiers that equal sizes share."""
    return {
        i: f"n{i}_of_{x.name}" if d is None else re.sub(r"\W", "_", f"n_{d}")
        for i, d in enumerate(S.dims_of(x) or ())
        if not isinstance(d, int)
    }


def _examples(values: Sequence[ir.Value]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield arguments for a loss: numbers of both signs, then numbers between 0 and 1."""
    rng = np.random.default_rng(0)
    sizes: dict[str, int] = {}
    shapes = []
    for x in values:
        symbols = _symbols(x)
        for name in symbols.values():
            sizes.setdefault(name, 3 + 2 * len(sizes))
        dims = enumerate(S.dims_of(x) or ())
        shapes.append([d if isinstance(d, int) else sizes[symbols[i]] for i, d in dims])
    classes = min(shapes[0][1:], default=2)
    for draw in (rng.standard_normal, lambda shape: rng.uniform(0.1, 0.9, shape)):
        batch: list[torch.Tensor] = []
        for x, shape in zip(values, shapes, strict=True):
            assert x.dtype is not None
            array = draw(shape) if S.is_float(x) else rng.integers(0, classes, shape)
            batch.append(torch.from_numpy(np.asarray(array).astype(x.dtype.numpy())))
        batch[0].requires_grad_()
        yield tuple(batch)


def _is_finite(module: nn.Module, batch: Sequence[torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            return bool(module(*batch).isfinite().all())
    except Exception:  # any exception of the user's function; _failure reports it
        return False


def _check_gradients(
    label: str,
    module: nn.Module,
    exported: ir.Model,
    batches: Sequence[tuple[torch.Tensor, ...]],
    names: Sequence[str],
) -> None:
    """Compare the gradient of the first argument with torch's.

    Raises:
        PrepareError: if they differ.
    """
    session = runtime.create(vjp(exported, names[0]).SerializeToString(), threads=1)
    inputs = [x.name for x in session.get_inputs()]
    for batch in batches:
        y = module(*batch)
        (expected,) = torch.autograd.grad(y.sum(), batch[0])
        arrays = [x.detach().numpy() for x in batch] + [np.ones(tuple(y.shape), np.float32)]
        feeds = {n: a for n, a in zip([*names, inputs[-1]], arrays, strict=True) if n in inputs}
        actual = runtime.run(session, [session.get_outputs()[-1].name], feeds)[0]
        error = np.abs(actual - expected.numpy()).max(initial=0.0)
        if not error <= _TOLERANCE * max(float(expected.abs().max()), 1.0):
            raise PrepareError(
                f"the gradient of the loss {label} differs from torch's by {error:.2g}\n"
                "hint: write it with differentiable operations of torch only"
            )
