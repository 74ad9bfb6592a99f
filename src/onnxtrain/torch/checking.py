"""Check that an exported model computes what the module computes.

``longer_inputs`` finds the sizes that may be symbolic: the module runs with other values of them.
``check`` compares outputs in evaluation and training mode, for the example and for another value of
each symbolic size, running statistics, and, if the module stops gradients, the gradients. Dropout
is disabled on both sides: the random masks differ.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onnxtrain.autodiff.gradients import lift, vjp
from onnxtrain.autodiff.gradients import parameters as parameter_values
from onnxtrain.errors import OnnxTrainError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.modes import to_evaluation
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.exporters import Axes, ExportError
from onnxtrain.torch.repairs import BATCH_NORMS, embedding_options

_TOLERANCE = 1e-3
"""Largest difference from torch that counts as rounding, relative to the largest output."""
_GRADIENT_TOLERANCE = 1e-2
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
_DATA: Any = torch.Tensor.data
_DETACH_FUNCTIONS = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, _DATA.__get__)


def check(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    longer: Mapping[str, Sequence[Any]],
    train: bool | None,
    initializer_of: dict[str, str],
) -> None:
    """Compare the model with the module, in evaluation mode and in the requested mode.

    Args:
        module: the exported module, in the mode it was exported in.
        model: the exported model.
        inputs: example inputs.
        names: names of the inputs.
        longer: inputs to compare besides, by the symbolic size that differs in them.
        train: as in :func:`onnxtrain.torch.from_torch`.
        initializer_of: initializer of each parameter of the module.

    Raises:
        ExportError: if outputs, running statistics or gradients differ.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    inference = model.clone()
    to_evaluation(inference)
    if train is not None or not any(mode for _, mode in modes):
        module.eval()
        _compare_with_torch(module, inference, inputs, names, longer, "evaluation mode")
    if train is False:
        return
    for submodule, mode in modes:
        submodule.training = mode
    if any(mode for _, mode in modes):
        with restore_statistics(module), _no_dropout(module):
            work = model.clone()
            _remove_dropout(work)
            _compare_with_torch(module, work, inputs, names, longer, "training mode")
        _check_statistics_updated(module, model, inputs)
    if any(t.requires_grad for t in (*module.parameters(), *flatten_tensors(inputs))):
        with restore_statistics(module), _no_dropout(module):
            work = model.clone()
            _remove_dropout(work)
            _check_gradients(module, work, inputs, names, initializer_of)


def _compare_with_torch(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    longer: Mapping[str, Sequence[Any]],
    mode: str,
) -> None:
    # Weights become inputs: with constant weights, onnxruntime folds a BatchNormalization into the
    # preceding Conv even in training mode. They are copied: onnxruntime updates the running
    # statistics in place.
    work = model.clone()
    random = random_nodes_to_inputs(work)
    weights = [x for x in work.graph.initializers.values() if S.is_float(x)]
    values = {x.name or "": x.const_value.numpy() for x in weights if x.const_value is not None}
    lift(work.graph, weights)
    session = runtime.create(ir.to_proto(work).SerializeToString(), threads=1)
    known = {i.name for i in session.get_inputs()}
    batches = {mode: inputs} | {f"{mode}, another {n}": batch for n, batch in longer.items()}
    for label, batch in batches.items():
        with torch.no_grad(), restore_statistics(module), RandomCalls() as calls:
            expected = flatten_tensors(module(*detached_copy(batch)))
        feeds = {n: np.array(v) for n, v in values.items() if n in known}
        feeds |= calls.feeds(random)
        feeds |= {
            n: x.detach().cpu().numpy()
            for n, x in zip(names, batch, strict=True)
            if n in known and isinstance(x, torch.Tensor)
        }
        try:
            actual = runtime.run(session, None, feeds)
        except OnnxTrainError as error:
            raise ExportError(f"{label}: {error}") from error
        _compare_outputs(expected, actual, label)


def _compare_outputs(
    expected: Sequence[torch.Tensor], actual: Sequence[np.ndarray], mode: str
) -> None:
    if len(actual) < len(expected):
        raise ExportError(f"the module has {len(expected)} outputs, the model {len(actual)}")
    for i, (a, b) in enumerate(zip(expected, actual, strict=False)):
        x = a.detach().cpu().numpy()
        if x.shape != b.shape:
            raise ExportError(
                f"{mode}: output {i} has shape {list(b.shape)}, torch {list(x.shape)}"
            )
        if x.dtype.kind != "f":
            continue
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(b)):
            raise ExportError(
                f"{mode}: output {i} has infinities or NaN where torch has none, or vice versa"
            )
        scale = max(float(np.abs(x[finite]).max(initial=0.0)), 1e-6)
        difference = np.abs(x[finite].astype(np.float64) - b[finite])
        worst = float(difference.max(initial=0.0)) / scale
        if not worst <= _TOLERANCE:
            raise ExportError(f"{mode}: output {i} differs from torch, relative error {worst:.2g}")


def longer_inputs(
    module: nn.Module, inputs: Sequence[Any], axes: Axes, train: bool | None
) -> tuple[dict[str, Sequence[Any]], dict[str, str]]:
    """Return inputs that are longer in one symbolic size each, and the sizes that stay fixed.

    A size may determine another one: labels of ``bptt * batch`` rows grow with both. Where the
    module does not run with one more in a single size, its multiples grow in proportion.

    Args:
        module: the module, in the mode it is exported in.
        inputs: example inputs.
        axes: symbolic axes of the inputs.
        train: as in :func:`onnxtrain.torch.from_torch`.

    Returns:
        The longer inputs, by symbolic size; and sizes with which the module does not run when they
        are longer, each with its error.
    """
    sizes = {
        name: x.shape[axis] for x, a in zip(inputs, axes, strict=True) for axis, name in a.items()
    }
    longer: dict[str, Sequence[Any]] = {}
    grown: set[str] = set()
    errors: dict[str, str] = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if name in grown:
            continue
        if not size:
            errors[name] = "the example has no values along it"
            continue
        multiples = {n: s // size * (size + 1) for n, s in sizes.items() if s and s % size == 0}
        for trial in ({name: size + 1}, multiples):
            batch = _resized(inputs, axes, trial)
            error = _error_of(module, batch, train)
            if error is None:
                longer[name] = batch
                grown |= trial.keys()
                break
            errors.setdefault(name, error)
    return longer, {n: e for n, e in errors.items() if n not in grown}


def _resized(inputs: Sequence[Any], axes: Axes, sizes: Mapping[str, int]) -> Sequence[Any]:
    """Return the inputs with other sizes; the values along an axis start again at its end."""
    batch = []
    for x, a in zip(inputs, axes, strict=True):
        for axis, name in a.items():
            if name in sizes:
                rows = torch.arange(sizes[name], device=x.device) % x.shape[axis]
                x = x.index_select(axis, rows)
        batch.append(x)
    return tuple(batch)


def _error_of(module: nn.Module, inputs: Sequence[Any], train: bool | None) -> str | None:
    """Return why the module does not run on these inputs, in the modes that :func:`check` uses."""
    training = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        with torch.no_grad(), restore_statistics(module):
            module(*detached_copy(inputs))
            if train:
                module.eval()
                module(*detached_copy(inputs))
    except Exception as error:  # a module raises any exception for a size it cannot run
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    finally:
        for submodule, mode in training:
            submodule.training = mode
    return None


def _check_statistics_updated(module: nn.Module, model: ir.Model, inputs: Sequence[Any]) -> None:
    """Raise if torch updates running statistics that the model does not update."""
    norms: dict[str, Any] = {
        name: submodule
        for name, submodule in module.named_modules()
        if isinstance(submodule, BATCH_NORMS)
        and submodule.training
        and submodule.running_mean is not None
    }
    before = {name: submodule.running_mean.clone() for name, submodule in norms.items()}
    with torch.no_grad(), restore_statistics(module), _no_dropout(module):
        module(*detached_copy(inputs))
        changed = [
            n for n, submodule in norms.items() if not submodule.running_mean.equal(before[n])
        ]
    updated = {
        mean.name
        for node in nodes(model.graph, "BatchNormalization", subgraphs=True)
        if (mean := node.inputs[3]) is not None
        and (mode := node.attributes.get("training_mode")) is not None
        and mode.as_int()
    }
    # A submodule registered under two names has its statistics stored under one of them.
    missing = [
        n
        for n in changed
        if not any(
            f"{other}.running_mean" in updated
            for other, submodule in module.named_modules(remove_duplicate=False)
            if submodule is norms[n]
        )
    ]
    if missing:
        raise ExportError(
            f"training mode: the model does not update the running statistics of "
            f"{', '.join(missing[:5])}"
        )


def _check_gradients(
    module: nn.Module,
    model: ir.Model,
    inputs: Sequence[Any],
    names: Sequence[str],
    initializer_of: dict[str, str],
) -> None:
    random = RandomCalls()
    expected, cotangents, reasons = _torch_gradients(module, inputs, names, initializer_of, random)
    if not expected:
        return
    feeds = {
        n: x.detach().cpu().numpy()
        for n, x in zip(names, inputs, strict=True)
        if isinstance(x, torch.Tensor)
    }
    feeds |= random.feeds(random_nodes_to_inputs(model))
    try:
        _compare_gradients(model, feeds, expected, cotangents, reasons)
    except UndifferentiableError:
        return  # not an export problem: differentiating the model raises the same error


def _torch_gradients(
    module: nn.Module,
    inputs: Sequence[Any],
    names: Sequence[str],
    initializer_of: dict[str, str],
    random: RandomCalls,
) -> tuple[dict[str, np.ndarray], list[np.ndarray], set[str]]:
    """Return torch's gradients, the cotangents used, and the calls that stop or replace gradients.

    The gradients are those of trainable parameters, by initializer, and of differentiable inputs.
    All are empty if no call stops or replaces gradients.
    """
    generator = np.random.default_rng(0)
    leaves = detached_copy(inputs)
    with torch.enable_grad(), random, _DetachRecorder() as recorder:
        outputs = flatten_tensors(module(*leaves))
    # Updated buffers come last in the outputs of a FlatModule; no gradient flows through them.
    results = len(outputs) - len(getattr(module, "changed_buffers", ()))
    cotangents = [
        np.array(generator.standard_normal(tuple(y.shape)) * (i < results), _numpy_dtype(y))
        for i, y in enumerate(outputs)
        if y.is_floating_point()
    ]
    outputs = [y for y in outputs if y.is_floating_point()]
    if any(_uses_custom_function(y) for y in outputs):
        recorder.reasons.add("autograd.Function")
    if not recorder.reasons:
        return {}, [], set()
    wrt = {initializer_of[n]: p for n, p in module.named_parameters() if p.requires_grad}
    wrt |= {
        n: x
        for n, x in zip(names, leaves, strict=True)
        if isinstance(x, torch.Tensor) and x.requires_grad
    }
    differentiable = [(y, s) for y, s in zip(outputs, cotangents, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in differentiable],
        list(wrt.values()),
        [torch.from_numpy(s).to(y) for y, s in differentiable],
        allow_unused=True,
    )
    grads = {
        n: (torch.zeros_like(p) if g is None else g).detach().cpu().numpy()
        for (n, p), g in zip(wrt.items(), gradients, strict=True)
    }
    return grads, cotangents, recorder.reasons


def _compare_gradients(
    model: ir.Model,
    feeds: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    cotangents: Sequence[np.ndarray],
    reasons: set[str],
) -> None:
    """Compare the gradients of the model with those of the module.

    Raises:
        ExportError: if they differ.
    """
    gradient = vjp(model, list(expected))
    session = runtime.create(gradient.SerializeToString(), threads=1)
    inputs = [i.name for i in session.get_inputs()]
    values = {**parameter_values(model, list(expected)), **feeds}
    # vjp appends one input per cotangent, in the order of the outputs.
    cotangent_inputs = inputs[len(inputs) - len(cotangents) :]
    values |= dict(zip(cotangent_inputs, cotangents, strict=True))
    names = [o.name for o in session.get_outputs()][-len(expected) :]
    actual = runtime.run(session, names, {n: values[n] for n in inputs})
    scale = max(float(np.abs(g).max(initial=0.0)) for g in expected.values())
    for (name, g), h in zip(expected.items(), actual, strict=True):
        worst = float(np.abs(g - h).max(initial=0.0))
        if not worst <= _GRADIENT_TOLERANCE * max(scale, 1e-6):
            raise ExportError(
                f"the gradient of {name!r} differs from torch: the module uses "
                f"{' and '.join(sorted(reasons))}, which ONNX cannot express"
            )


_NORMAL = ("RandomNormal", "RandomNormalLike")
_UNIFORM = ("RandomUniform", "RandomUniformLike")
_RANDOM: dict[Any, tuple[str, ...]] = {
    torch.randn: _NORMAL,
    torch.randn_like: _NORMAL,
    torch.normal: _NORMAL,
    torch.rand: _UNIFORM,
    torch.rand_like: _UNIFORM,
    torch.bernoulli: ("Bernoulli",),
}
"""Functions that draw random numbers, with the operators that they are exported to."""
_OTHER_RANDOM = {
    *(torch.randint, torch.randint_like, torch.multinomial, torch.randperm, torch.poisson),
    *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_),
    *(torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.bernoulli),
}


class RandomCalls(TorchFunctionMode):
    """Record the random numbers of a forward pass, to give a model the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[str, tuple[str, ...], torch.Tensor]] = []
        self._others: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func in _RANDOM:
            noise = y
            if func is torch.normal:  # exported as mean + std * noise
                mean, std = (*args, *kwargs.values())[:2]
                noise = (y - mean) / std
            self._drawn.append((func.__name__, _RANDOM[func], noise.detach().clone()))
        elif func in _OTHER_RANDOM:
            self._others.append(func.__name__)
        return y

    def feeds(self, nodes: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Return the numbers for the inputs of a model.

        Args:
            nodes: operator of each input that replaces a random node, in order.

        Raises:
            ExportError: the model does not draw what the module draws.
        """
        operators = [operators for _, operators, _ in self._drawn]
        same = len(nodes) == len(operators) and all(
            op in known for op, known in zip(nodes.values(), operators, strict=True)
        )
        if self._others or not same:
            names = dict.fromkeys([*self._others, *(name for name, _, _ in self._drawn)])
            if not names:
                return {}
            raise ExportError(
                f"the module draws random numbers ({', '.join(names)}) that the exported model "
                "does not\nhint: draw them outside, and pass them to forward as an input"
            )
        return {x: noise.cpu().numpy() for x, (_, _, noise) in zip(nodes, self._drawn, strict=True)}


def random_nodes_to_inputs(model: ir.Model) -> dict[str, str]:
    """Replace random nodes by inputs, in place; return the operator of each input, in order."""
    operators = {op for known in _RANDOM.values() for op in known}
    inputs: dict[str, str] = {}
    for i, node in enumerate(nodes(model.graph, *sorted(operators))):
        y = node.outputs[0]
        x = ir.Value(name=f"random.{i}", type=y.type, shape=y.shape)
        model.graph.inputs.append(x)
        y.replace_all_uses_with(x, replace_graph_outputs=True)
        inputs[x.name or ""] = node.op_type
        model.graph.remove(node, safe=True)
    return inputs


class _DetachRecorder(TorchFunctionMode):
    """Record calls that detach tensors from the autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DETACH_FUNCTIONS:
            self.reasons.add("detach")
        elif embedding_options(func, args, kwargs or {}).get("padding_idx") is not None:
            self.reasons.add("padding_idx")
        elif func is torch._C._set_grad_enabled and args and not args[0]:
            self.reasons.add("no_grad")
        return func(*args, **(kwargs or {}))


def _uses_custom_function(y: torch.Tensor) -> bool:
    """Return whether the autograd graph of an output has a custom ``autograd.Function``."""
    pending, seen = [y.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        pending += [parent for parent, _ in node.next_functions]
    return False


def _numpy_dtype(y: torch.Tensor) -> Any:
    return torch.empty((), dtype=y.dtype).numpy().dtype


def ignores_parameters(module: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> bool:
    """Return whether the outputs do not depend on these parameters: NaN in them changes nothing."""

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad(), restore_statistics(module), _no_dropout(module):
            return flatten_tensors(module(*detached_copy(inputs)))

    parameters = [module.get_parameter(n) for n in names]
    before = outputs()
    saved = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                p.fill_(float("nan"))
        after = outputs()
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, saved, strict=True):
                p.copy_(value)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def detached_copy(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the inputs with every tensor copied to a leaf of its own autograd graph.

    The module may change its inputs in place, and ``copy.deepcopy`` refuses tensors that are not
    leaves, such as the output of another layer.
    """

    def copied(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.detach().clone().requires_grad_(x.requires_grad)
        return copy.deepcopy(x)

    return pytree.tree_map(copied, tuple(inputs))


def flatten_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return (
        [t for o in outputs for t in flatten_tensors(o)]
        if isinstance(outputs, list | tuple)
        else []
    )


@contextlib.contextmanager
def restore_statistics(module: nn.Module) -> Iterator[None]:
    """Restore buffers, such as running statistics, after forward passes in training mode."""
    saved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])


def _remove_dropout(model: ir.Model) -> None:
    norms = [
        (n, n.attributes["training_mode"])
        for n in model.graph.all_nodes()
        if n.op_type == "BatchNormalization" and "training_mode" in n.attributes
    ]
    # to_evaluation would also switch BatchNormalization to inference: hide its mode meanwhile.
    for node, mode in norms:
        if mode.as_int():
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    to_evaluation(model)
    for node, mode in norms:
        node.attributes["training_mode"] = mode


class _NoDropout(TorchFunctionMode):
    """Replace dropout functions with the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention and kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_dropout(module: nn.Module) -> Iterator[None]:
    """Set every dropout probability to zero, including those of attention and recurrent layers."""
    saved: list[tuple[nn.Module, str, Any]] = []
    for submodule in module.modules():
        names = ["p"] if isinstance(submodule, _DROPOUTS) else ["dropout", "dropout_p"]
        for name in names:
            value = getattr(submodule, name, None)
            if isinstance(value, float):
                saved.append((submodule, name, value))
                setattr(submodule, name, 0.0)
    try:
        with _NoDropout():
            yield
    finally:
        for submodule, name, value in saved:
            setattr(submodule, name, value)
