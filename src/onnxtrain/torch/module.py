"""A torch module whose forward and backward passes run on ONNX Runtime.

The two sessions of a compiled call as one differentiable function.

torch tensors and OrtValues over the same memory.

Forward and backward sessions of a module, for one kind of call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onnxtrain.autodiff.gradients import lift, load_normalized
from onnxtrain.autodiff.split import split
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.simplify import simplify
from onnxtrain.modes import running_statistics
from onnxtrain.modes.randomness import portable_dropout
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.checking import restore_statistics
from onnxtrain.torch.export import export, last_report
from onnxtrain.torch.exporters import ExportError

logger = logging.getLogger(__name__)


def to_array(t: torch.Tensor) -> np.ndarray:
    """Return an array over the tensor's memory; numpy knows no bfloat16."""
    if t.requires_grad:
        t = t.detach()
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def to_runtime(t: torch.Tensor) -> Any:
    """Return an OrtValue over the tensor's memory; it lives as long as the tensor."""
    t = t.detach()
    if not t.is_contiguous():
        t = t.contiguous()
    kind = runtime.import_onnxruntime().OrtValue
    if t.device.type == "cpu" and t.dtype is not torch.bfloat16:
        return kind.ortvalue_from_numpy(t.numpy())
    return kind.from_dlpack(_Flags(t) if t.dtype is torch.bool else t)


class _Flags:
    """A tensor of bools as onnxruntime imports it: bytes in DLPack, the type told apart."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype, self._bytes = t.dtype, t.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self._bytes.__dlpack__()


def to_torch(value: Any) -> torch.Tensor:
    """Return a tensor over the OrtValue's memory, which it keeps alive."""
    if value.device_name() == "cpu" and value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    t = torch.from_dlpack(value)
    return t.view(torch.bool) if value.data_type() == "tensor(bool)" else t


RNG = "onnxtrain.rng"
_INNER_PREFIX = "inner."


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
            _structure_key(rest, places, structure),
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
    return rest, places, structure, _structure_key(rest, places, structure)


def _structure_key(rest: tuple[Any, ...], places: tuple[int, ...], structure: Any) -> Any:
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
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restore_statistics(module):
        args, kwargs = call.arguments(call.tensors)
        leaves, structure = pytree.tree_flatten(module(*args, **kwargs))
    model = _export(module, call, earlier)
    parameters, stored = _distinct_parameters(model)
    labels = [x.name or "" for x in model.graph.inputs]
    dims = [
        [d if isinstance(d, int) else str(d) for d in x.shape or ()] for x in model.graph.inputs
    ]
    work = load_normalized(model).model
    graph = work.graph
    shown = [y.name or "" for y in graph.outputs]
    portable_dropout(work, rng_input_name=RNG)
    changed = _expose_statistics(work)
    _require_statistics(model, changed)
    read = {
        f"{_INNER_PREFIX}{n}": n
        for n, _ in module.named_buffers()
        if f"{_INNER_PREFIX}{n}" in graph.initializers
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
    _split_graphs(compiled, work, wanted, threads)
    return compiled


def _distinct_parameters(model: ir.Model) -> tuple[list[str], list[str]]:
    """Return the names of the parameters in the module, one for those that are shared, and ours."""
    by_place: dict[str, str] = {}
    for name, at in last_report(model).names.items():
        by_place.setdefault(at, name.removeprefix(_INNER_PREFIX))
    return list(by_place.values()), list(by_place)


def _expose_statistics(work: ir.Model) -> dict[str, str]:
    """Make new running statistics outputs; return the buffer of the module for each of those."""
    op = OpBuilder(work.graph, "module/")
    changed: dict[str, str] = {}
    for buffer in running_statistics(work, op):
        out = op.Identity(buffer.new)
        out.name = f"{buffer.name}.out"
        work.graph.outputs.append(out)
        changed[out.name] = buffer.name.removeprefix(_INNER_PREFIX)
    return changed


def _require_statistics(model: ir.Model, changed: Mapping[str, str]) -> None:
    """Refuse a graph that has lost the training mode in which its model was exported."""
    wanted = {
        (x.name or "").removeprefix(_INNER_PREFIX)
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


def _split_graphs(
    compiled: CompiledCall, work: ir.Model, wanted: list[str], threads: int | None
) -> None:
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
        compiled.forward = Session(finalize(simplify(work)), compiled.device, threads)


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


class CompiledFunction(torch.autograd.Function):
    """Forward and backward of a compiled call."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledCall, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Run the forward session; keep what the backward session reads."""
        named = dict(zip([*compiled.inputs, *compiled.stored], tensors, strict=True))
        made = run_forward(compiled, module, named)
        outputs = [made[n] for n in compiled.outputs]
        # Through torch, so that it frees them in time and notices changes in place.
        kept = [made[n] for n in compiled.saved] + [named[n] for n in compiled.passed if n in named]
        ctx.save_for_backward(*kept)
        ctx.compiled = compiled
        ctx.others = {n: made[n] for n in compiled.passed if n not in named}
        ctx.outputs = {n: (made[n].shape, made[n].dtype) for n in compiled.differentiable}
        ctx.mark_non_differentiable(
            *(made[n] for n in compiled.outputs if n not in compiled.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> Any:
        """Run the backward session."""
        compiled: CompiledCall = ctx.compiled
        own = set(compiled.inputs) | set(compiled.stored)
        names = [*compiled.saved, *(n for n in compiled.passed if n in own)]
        feeds = dict(zip(names, ctx.saved_tensors, strict=True)) | ctx.others
        given = dict(zip(compiled.outputs, grads, strict=True))
        for name, at in zip(compiled.differentiable, compiled.cotangents, strict=True):
            g = given[name]
            if g is None:
                shape, dtype = ctx.outputs[name]
                g = torch.zeros(shape, dtype=dtype, device=compiled.device)
            feeds[at] = g
        assert compiled.backward is not None
        gradients = _run(compiled, compiled.backward, feeds)
        by_name = dict(zip(compiled.wrt, gradients.values(), strict=True))
        return (None, None, *(by_name.get(n) for n in (*compiled.inputs, *compiled.stored)))


def run_forward(
    compiled: CompiledCall, module: nn.Module, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run the forward session and update the module's buffers; return everything it put out."""
    assert compiled.forward is not None
    buffers: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    if compiled.read or compiled.buffers:
        buffers = dict(module.named_buffers())
        taken = compiled.forward.inputs
        others = {at: buffers[n].clone() for at, n in compiled.read.items() if at in taken}
    if compiled.random:
        draw = torch.randint(0, 1 << 24, (2,)).to(torch.float32)
        others[RNG] = draw.to(compiled.device)
    made = _run(compiled, compiled.forward, {**named, **others})
    if compiled.buffers or compiled.counters:
        with torch.no_grad():
            for out, name in compiled.buffers.items():
                buffers[name].copy_(made[out])
            for name in compiled.counters:
                buffers[name].add_(1)
    return {**others, **made}


def _run(
    compiled: CompiledCall, at: Session, feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if compiled.device.type == "cpu" and at.arrays:
        # Arrays share memory as OrtValues do, and cost a third of the time to hand over.
        arrays = {n: to_array(feeds[n]) for n in at.inputs}
        results = runtime.run(at.session, at.outputs, arrays)
        return {n: torch.from_numpy(a) for n, a in zip(at.outputs, results, strict=True)}
    values = {n: to_runtime(feeds[n]) for n in at.inputs}
    if compiled.device.type == "cpu":
        outputs = runtime.run_values(at.session, at.outputs, values)
    else:
        outputs = _run_bound(compiled, at, values)
    return {n: to_torch(v) for n, v in zip(at.outputs, outputs, strict=True)}


def _run_bound(compiled: CompiledCall, at: Session, values: Mapping[str, Any]) -> list[Any]:
    """Run with results left where the call's device is."""
    binding = at.session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in at.outputs:
        binding.bind_output(name, compiled.device.type, compiled.device.index or 0)
    torch.cuda.current_stream(compiled.device).synchronize()
    runtime.run_bound(at.session, binding)
    return list(binding.get_outputs())


_MODULE_PREFIX = "module."


class TrainableModule(nn.Module):
    """Runs a module's forward and backward passes as two ONNX sessions.

    It is a module like any other: its parameters are the wrapped module's, by the same names, so
    every torch optimizer, gradient accumulation, hooks and ``DistributedDataParallel`` work. The
    module is exported again when the mode of a part, what needs a gradient, or rank or dtype of an
    input change; a change of batch size costs nothing, one of another size an export. Buffers such
    as running statistics are updated as torch does; dropout masks are drawn anew for each call from
    torch's generator. Under autocast it computes in the precision of its parameters.

    Args:
        module: what to run.
        fallback: run the module in torch, with a warning, where it cannot be exported or
            differentiated.
        threads: of onnxruntime's pool; ``None`` takes all cores.
    """

    def __init__(
        self, module: nn.Module, *, fallback: bool = False, threads: int | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.fallback = fallback
        self.threads = threads
        self.training = module.training
        self._plans: dict[Any, list[CompiledCall] | None] = {}
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped module gives."""
        call = FlatArguments.of(args, kwargs)
        call = _in_full_precision(self.module, call)
        need = torch.is_grad_enabled()
        modes, known = state_of(self.module)
        wanted = tuple(p.requires_grad for p in known) if need else None
        compiled = self._plan(call, tuple(modes), wanted)
        if compiled is None:
            return self.module(*args, **kwargs)
        parameters = [known[i] for i in compiled.order]
        if compiled.backward is None:
            feeds = dict(
                zip([*compiled.inputs, *compiled.stored], [*call.tensors, *parameters], strict=True)
            )
            made = run_forward(compiled, self.module, feeds)
            return compiled.result([made[n] for n in compiled.outputs])
        return compiled.result(
            CompiledFunction.apply(compiled, self.module, *call.tensors, *parameters)
        )

    def _plan(
        self, call: FlatArguments, modes: tuple[bool, ...], wanted: tuple[bool, ...] | None
    ) -> CompiledCall | None:
        """Return the compiled call, from those that there are; ``None`` stands for torch."""
        key = (modes, wanted, call.kind)
        compiled_calls = self._plans.setdefault(key, [])
        if compiled_calls is None:
            return None
        for compiled in compiled_calls:
            if compiled.fits(call.tensors):
                return compiled
        if compiled_calls:
            logger.info(
                "%s is exported again: input shapes are %s, exported before for %s",
                type(self.module).__name__,
                [tuple(t.shape) for t in call.tensors],
                ", ".join(str(compiled.shapes) for compiled in compiled_calls),
            )
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                compiled = compile_call(
                    self.module, call, wanted is not None, self.threads, compiled_calls
                )
        except OnnxTrainError as error:
            if not self.fallback:
                raise
            warnings.warn(
                f"{type(self.module).__name__} runs in torch: {_reason(error)}", stacklevel=4
            )
            self._plans[key] = None
            return None
        compiled_calls.append(compiled)
        return compiled

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the wrapped module's parameters, by its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the wrapped module's buffers, by its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # sessions cannot be copied


def _without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    own = f"{prefix}{_MODULE_PREFIX}"
    for name in [n for n in state if n.startswith(own)]:
        state[prefix + name.removeprefix(own)] = state.pop(name)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [n for n in state if n.startswith(prefix)]:
        state[f"{prefix}{_MODULE_PREFIX}{name.removeprefix(prefix)}"] = state.pop(name)


def _in_full_precision(module: nn.Module, call: FlatArguments) -> FlatArguments:
    """Undo what autocast has done to the inputs, which the sessions do not know of."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return call
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return call
    (dtype,) = dtypes
    tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in call.tensors)
    return dataclasses.replace(call, tensors=tensors)


def _reason(error: OnnxTrainError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith("hint:"))
