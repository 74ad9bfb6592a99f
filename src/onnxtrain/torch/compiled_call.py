"""Forward and backward sessions of a module, for one kind of call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onnxtrain.autodiff.gradient_model import lift
from onnxtrain.autodiff.load_normalized import load_normalized
from onnxtrain.autodiff.split import split
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.finish import finish
from onnxtrain.graph.modes import running_statistics
from onnxtrain.graph.modes.randomness import portable_dropout
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.simplify import simplify
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.checking import untracked
from onnxtrain.torch.export import export, last_report
from onnxtrain.torch.torch_exporters import ExportError

RNG = "onnxtrain.rng"
_INNER = "inner."


@dataclasses.dataclass(frozen=True)
class FlatArguments:
    """Arguments of one call, flattened: the tensors, and what else there is."""

    tensors: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...]
    """The leaves in order, with ``None`` in place of the tensors."""
    places: tuple[int, ...]
    """Where in ``rest`` the tensors belong."""
    structure: Any
    form: Any
    """Everything but the tensors, as a key."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatArguments:
        """Flatten the arguments of a call."""
        if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            return cls(args, *_only_tensors(len(args)))
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        places = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
        rest = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        return cls(
            tuple(leaves[i] for i in places),
            rest,
            places,
            structure,
            _form(rest, places, structure),
        )

    @property
    def kind(self) -> Any:
        """What makes two calls different to the exporter, sizes aside."""
        tensors = tuple((t.dim(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        return tensors, self.form

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the same structure with other tensors."""
        leaves = list(self.rest)
        for place, t in zip(self.places, tensors, strict=True):
            leaves[place] = t
        return pytree.tree_unflatten(leaves, self.structure)


@functools.lru_cache(maxsize=64)
def _only_tensors(count: int) -> tuple[Any, ...]:
    """Return all but the tensors of a call with so many of them: most calls are such."""
    rest, places = (None,) * count, tuple(range(count))
    structure = pytree.tree_structure((rest, {}), is_leaf=lambda x: x is None)
    return rest, places, structure, _form(rest, places, structure)


def _form(rest: tuple[Any, ...], places: tuple[int, ...], structure: Any) -> Any:
    values = tuple(x if isinstance(x, bool | int | float | str) else repr(x) for x in rest)
    return tuple(map(type, rest)), values, places, str(structure)


class _TensorsOnly(nn.Module):
    """The module as a function of tensors that gives tensors."""

    def __init__(self, module: nn.Module, call: FlatArguments) -> None:
        super().__init__()
        self.inner = module
        self.call = call
        self.training = module.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.arguments(tensors)
        leaves = pytree.tree_leaves(self.inner(*args, **kwargs))
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


class Session:
    """An onnxruntime session with its names at hand."""

    def __init__(self, model: onnx.ModelProto, device: torch.device, threads: int | None) -> None:
        self.session = runtime.create(
            model.SerializeToString(),
            device=device.type,
            device_id=device.index or 0,
            threads=threads,
        )
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs = [o.name for o in self.session.get_outputs()]
        kinds = [x.type for x in (*self.session.get_inputs(), *self.session.get_outputs())]
        self.arrays = not any("bfloat16" in kind for kind in kinds)
        """Whether numpy knows every type."""


@dataclasses.dataclass
class CompiledCall:
    """Two sessions and what they exchange."""

    forward: Session | None
    backward: Session | None
    """``None`` if no gradient is wanted."""
    inputs: list[str]
    dims: list[list[int | str]]
    """Sizes of the inputs: numbers, or names for any number."""
    shapes: list[tuple[int, ...]]
    """Of the example."""
    parameters: list[str]
    """Names in the module, one per distinct parameter, in the order of the graph."""
    stored: list[str]
    """Names of the same in the graph."""
    outputs: list[str]
    buffers: dict[str, str]
    """Output of the forward graph -> buffer of the module."""
    counters: list[str]
    """Buffers that count batches."""
    read: dict[str, str]
    """Input of the graph -> buffer of the module."""
    random: bool
    device: torch.device
    saved: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    """Outputs that take a cotangent."""
    cotangents: tuple[str, ...] = ()
    """Inputs of the backward graph for those."""
    wrt: tuple[str, ...] = ()
    structure: Any = None
    leaves: tuple[Any, ...] = ()
    """Outputs that are no tensors, ``None`` in place of those that are."""
    places: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    """Places of ``parameters`` in the order in which :func:`state_of` gives them."""

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the sizes are those that the graph was made for."""
        known: dict[str, int] = {}
        for t, dims in zip(tensors, self.dims, strict=True):
            for size, dim in zip(t.shape, dims, strict=True):
                if (size if isinstance(dim, int) else known.setdefault(dim, size)) != (
                    dim if isinstance(dim, int) else size
                ):
                    return False
        return True

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return outputs in the structure that the module gives them."""
        if self.structure.is_leaf():
            return tensors[0]
        leaves = list(self.leaves)
        for place, t in zip(self.places, tensors, strict=True):
            leaves[place] = t
        return pytree.tree_unflatten(leaves, self.structure)


def compile_call(
    module: nn.Module,
    call: FlatArguments,
    need: bool,
    threads: int | None,
    earlier: Sequence[CompiledCall],
) -> CompiledCall:
    """Export the module as it stands, and cut it into a forward and a backward session.

    Args:
        module: in the modes in which it is to run.
        call: an example.
        need: whether gradients are wanted.
        threads: of onnxruntime.
        earlier: compiled for the same kind of call; axes whose sizes have changed since become
            symbolic.
    """
    device = _device(module, call)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), untracked(module):
        args, kwargs = call.arguments(call.tensors)
        leaves, structure = pytree.tree_flatten(module(*args, **kwargs))
    model = _export(module, call, earlier)
    parameters, stored = _distinct_parameters(model)
    labels = [x.name or "" for x in model.graph.inputs]
    dims = [
        [d if isinstance(d, int) else str(d) for d in x.shape or ()] for x in model.graph.inputs
    ]
    work = load_normalized(model)
    graph = work.graph
    shown = [y.name or "" for y in graph.outputs]
    portable_dropout(work, rng_input_name=RNG)
    changed = _expose_statistics(work)
    _require_statistics(model, changed)
    read = {
        f"{_INNER}{n}": n for n, _ in module.named_buffers() if f"{_INNER}{n}" in graph.initializers
    }
    lift(graph, [graph.initializers[n] for n in read])
    wanted = [n for n, t in zip(labels, call.tensors, strict=True) if need and t.requires_grad]
    for name, at in zip(parameters, stored, strict=True):
        if need and at in graph.initializers and module.get_parameter(name).requires_grad:
            wanted.append(at)
    lift(graph, [graph.initializers[n] for n in stored if n in graph.initializers])
    compiled = CompiledCall(
        forward=None,
        backward=None,
        inputs=labels,
        dims=dims,
        shapes=[tuple(t.shape) for t in call.tensors],
        parameters=parameters,
        stored=stored,
        outputs=shown,
        buffers=changed,
        counters=_counters(module, changed),
        read=read,
        random=any(x.name == RNG for x in graph.inputs),
        device=device,
        structure=structure,
        leaves=tuple(None if isinstance(x, torch.Tensor) else x for x in leaves),
        places=tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)),
        order=_order(module, parameters),
    )
    if len(compiled.places) != len(shown):
        raise ExportError(
            f"{type(module).__name__} gives {len(compiled.places)} tensors, its graph {len(shown)}"
        )
    _cut(compiled, work, wanted, threads)
    return compiled


def _distinct_parameters(model: ir.Model) -> tuple[list[str], list[str]]:
    """Return the names of the parameters in the module, one for those that are shared, and ours."""
    by_place: dict[str, str] = {}
    for name, at in last_report(model).names.items():
        by_place.setdefault(at, name.removeprefix(_INNER))
    return list(by_place.values()), list(by_place)


def _expose_statistics(work: ir.Model) -> dict[str, str]:
    """Make new running statistics outputs; return the buffer of the module for each of those."""
    op = OpBuilder(work.graph, "module/")
    changed: dict[str, str] = {}
    for buffer in running_statistics(work, op):
        out = op.Identity(buffer.new)
        out.name = f"{buffer.name}.out"
        work.graph.outputs.append(out)
        changed[out.name] = buffer.name.removeprefix(_INNER)
    return changed


def _require_statistics(model: ir.Model, changed: Mapping[str, str]) -> None:
    """Refuse a graph that has lost the training mode in which its model was exported."""
    wanted = {
        (x.name or "").removeprefix(_INNER)
        for node in nodes(model.graph, "BatchNormalization", subgraphs=True)
        for x in node.inputs[3:]
        if x is not None
        and x.is_initializer()
        and (mode := node.attributes.get("training_mode")) is not None
        and mode.as_int()
    }
    lost = sorted(wanted - set(changed.values()))
    if lost:
        raise ExportError(f"training mode got lost: nothing would change {', '.join(lost[:5])}")


def _cut(compiled: CompiledCall, work: ir.Model, wanted: list[str], threads: int | None) -> None:
    floats = [
        y.name or "" for y in work.graph.outputs if y.name in compiled.outputs and S.is_float(y)
    ]
    if wanted and floats:
        cut = split(work, wanted, floats, target=compiled.device.type)
        compiled.forward = Session(cut.forward, compiled.device, threads)
        compiled.backward = Session(cut.backward, compiled.device, threads)
        compiled.saved, compiled.passed, compiled.wrt = cut.saved, cut.passed, cut.wrt
        compiled.differentiable = cut.outputs
        names = [x.name for x in cut.backward.graph.input]
        compiled.cotangents = tuple(names[len(names) - len(cut.outputs) :])
    else:
        compiled.forward = Session(finish(simplify(work)), compiled.device, threads)


def _export(module: nn.Module, call: FlatArguments, earlier: Sequence[CompiledCall]) -> ir.Model:
    flat = _TensorsOnly(module, call)
    names = [f"input_{i}" for i in range(len(call.tensors))]
    label = type(module).__name__
    some = _symbolic(call, earlier)
    rows = [{i: n for i, n in axes.items() if i == 0} for axes in some]
    none: list[dict[int, str]] = [{} for _ in some]
    tries = [some, *([rows] if rows != some else []), *([none] if any(rows) else [])]
    for axes in tries:
        try:
            return export(flat, call.tensors, names, axes, train=None, label=label)
        except ExportError:
            if axes is tries[-1]:
                raise
    raise AssertionError("there is at least one try")


def _symbolic(call: FlatArguments, earlier: Sequence[CompiledCall]) -> list[dict[int, str]]:
    """Name the first axes, and those whose sizes have changed; equal sizes have equal names."""
    dynamic_axes = []
    for i, t in enumerate(call.tensors):
        axes = {
            axis: f"size_{size}"
            for axis, size in enumerate(t.shape)
            if axis == 0 or (size > 1 and any(p.shapes[i][axis] != size for p in earlier))
        }
        dynamic_axes.append(axes)
    return dynamic_axes


def state_of(module: nn.Module) -> tuple[list[bool], list[nn.Parameter]]:
    """Return the modes of all parts and the parameters, each once, in one walk over the module."""
    modes: list[bool] = []
    parameters: dict[nn.Parameter, None] = {}
    _walk(module, set(), modes, parameters)
    return modes, list(parameters)


def _walk(
    module: nn.Module,
    seen: set[nn.Module],
    modes: list[bool],
    parameters: dict[nn.Parameter, None],
) -> None:
    seen.add(module)
    modes.append(module.training)
    for p in module._parameters.values():
        if p is not None:
            parameters[p] = None
    for part in module._modules.values():
        if part is not None and part not in seen:
            _walk(part, seen, modes, parameters)


def _order(module: nn.Module, names: Sequence[str]) -> tuple[int, ...]:
    places = {p: i for i, p in enumerate(state_of(module)[1])}
    return tuple(places[module.get_parameter(n)] for n in names)


def _counters(module: nn.Module, changed: Mapping[str, str]) -> list[str]:
    known = dict(module.named_buffers())
    names = {
        f"{n.rpartition('.')[0]}.num_batches_tracked".removeprefix(".") for n in changed.values()
    }
    return [n for n in names if n in known]


def _device(module: nn.Module, call: FlatArguments) -> torch.device:
    tensors = [*call.tensors, *module.parameters(), *module.buffers()]
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise OnnxTrainError(f"inputs and parameters are on several devices: {names}")
    device = next(iter(devices), torch.device("cpu"))
    runtime.check_device(device.type)
    return device
