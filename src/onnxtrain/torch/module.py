"""Run a torch module's forward and backward passes on ONNX Runtime.

``TrainableModule`` exports the wrapped module for each new combination of training modes,
``requires_grad``, and rank and dtype of the inputs. ``compile_call`` splits the export into a
forward and a backward session; ``CompiledFunction`` runs both as one ``torch.autograd.Function``.
Tensors and OrtValues share memory.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.autodiff.gradients import lift, load_normalized
from onnxtrain.autodiff.split import split
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.external_data import weights_folder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.simplify import simplify
from onnxtrain.modes import running_statistics
from onnxtrain.modes.randomness import portable_dropout
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import Device
from onnxtrain.runtime.devices import check as check_device
from onnxtrain.torch.calls import INNER_PREFIX, FlatArguments, FlatModule, FlatResults
from onnxtrain.torch.checking import detached_copy
from onnxtrain.torch.export import export_module, last_report
from onnxtrain.torch.exporters import ExportError

logger = logging.getLogger(__name__)
RNG = "onnxtrain.rng"
_MODULE_PREFIX = "module."
Save = Callable[[str, onnx.ModelProto | ir.Model], None]
"""Receives the name of a stage and its model."""


class TrainableModule(nn.Module):
    """Run a module's forward and backward passes as two ONNX Runtime sessions.

    It has the parameters of the wrapped module under the same names, so torch optimizers, gradient
    accumulation, hooks and ``DistributedDataParallel`` work. It exports the module again when a
    training mode, a ``requires_grad``, or the rank or dtype of an input changes. A new batch size
    needs no export; a new size of another axis needs one. Buffers and inputs that the module
    changes in its forward pass change as in torch. Results other than tensors must be constants.
    Each call draws new dropout masks from torch's generator. Under autocast it computes in the
    precision of its parameters.

    Args:
        module: the module to run.
        fallback: run the module in torch, with a warning, if it cannot be exported or
            differentiated.
        threads: threads of onnxruntime; ``None`` uses all cores.
    """

    def __init__(
        self, module: nn.Module, *, fallback: bool = False, threads: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise OnnxTrainError(
                f"not a torch module: {module!r}\n"
                "hint: onnxtrain.torch.as_module(...) makes one of an ONNX model"
            )
        self.module = module
        self.fallback = fallback
        self.threads = threads
        self.training = module.training
        self._compiled_calls: dict[Any, list[CompiledCall] | None] = {}
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    @property
    def forward(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The forward pass on ONNX Runtime, with the signature of the wrapped module's ``forward``.

        Hugging Face's ``Trainer`` reads the signature to choose columns of the data.
        """
        run = functools.partial(self._run)
        run.__wrapped__ = self.module.forward  # pyright: ignore[reportAttributeAccessIssue]
        return run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = FlatArguments.of(args, kwargs)
        call = _in_full_precision(self.module, given)
        differentiable = torch.is_grad_enabled()
        modes, known = modes_and_parameters(self.module)
        wrt = tuple(p.requires_grad for p in known) if differentiable else None
        compiled = self._compiled_call(call, tuple(modes), wrt)
        if compiled is None:
            return self.module(*args, **kwargs)
        assert compiled.results is not None
        tensors = [*compiled.results.protected(call.tensors), *(known[i] for i in compiled.order)]
        if compiled.backward is None:
            feeds = dict(zip([*compiled.inputs, *compiled.initializers], tensors, strict=True))
            results = run_forward(compiled, self.module, feeds)
            outputs = [results[n] for n in compiled.outputs]
        else:
            outputs = CompiledFunction.apply(compiled, self.module, *tensors)
        return compiled.results.restore(outputs, given.tensors)

    def _compiled_call(
        self, call: FlatArguments, modes: tuple[bool, ...], wrt: tuple[bool, ...] | None
    ) -> CompiledCall | None:
        """Return the cached or newly compiled call; ``None`` to run the module in torch."""
        key = (modes, wrt, call.kind)
        compiled_calls = self._compiled_calls.setdefault(key, [])
        if compiled_calls is None:
            return None
        for compiled in compiled_calls:
            if compiled.matches(call.tensors):
                return compiled
        if compiled_calls:
            logger.info(
                "exporting %s again: input shapes are %s, previous exports are for %s",
                type(self.module).__name__,
                [tuple(t.shape) for t in call.tensors],
                ", ".join(str(compiled.shapes) for compiled in compiled_calls),
            )
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                compiled = compile_call(
                    self.module,
                    call,
                    wrt is not None,
                    self.threads,
                    compiled_calls,
                    self._save_model,
                )
        except OnnxTrainError as error:
            if not self.fallback:
                raise
            warnings.warn(
                f"{type(self.module).__name__} runs in torch: {_reason(error)}", stacklevel=4
            )
            self._compiled_calls[key] = None
            return None
        compiled_calls.append(compiled)
        return compiled

    def _save_model(self, stage: str, model: onnx.ModelProto | ir.Model) -> None:
        """Do nothing; a subclass may write the models of each stage to files."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the wrapped module, under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers of the wrapped module, under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled_calls": {}}  # sessions cannot be pickled


def _without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    inner = f"{prefix}{_MODULE_PREFIX}"
    for name in [n for n in state if n.startswith(inner)]:
        state[prefix + name.removeprefix(inner)] = state.pop(name)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [n for n in state if n.startswith(prefix)]:
        state[f"{prefix}{_MODULE_PREFIX}{name.removeprefix(prefix)}"] = state.pop(name)


def _in_full_precision(module: nn.Module, call: FlatArguments) -> FlatArguments:
    """Cast autocast inputs back to the dtype of the parameters, which the sessions expect."""
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


@dataclasses.dataclass
class CompiledCall:
    """The forward and backward session of one kind of call, and the values they exchange."""

    forward: Session | None
    backward: Session | None
    """``None`` if no gradient is needed."""
    inputs: list[str]
    dims: list[list[int | str]]
    """Input shapes: fixed sizes, or names of symbolic ones."""
    shapes: list[tuple[int, ...]]
    """Input shapes of the example call."""
    parameters: list[str]
    """Names in the module, one per distinct parameter, in graph order."""
    initializers: list[str]
    """Initializers of the same parameters in the graph."""
    outputs: list[str]
    buffers: dict[str, str]
    """Output of the forward graph -> buffer of the module."""
    counters: list[str]
    """The ``num_batches_tracked`` buffers to increment."""
    read: dict[str, str]
    """Input of the graph -> buffer of the module."""
    random: bool
    device: torch.device
    """Where the tensors are."""
    provider: Device | None = None
    """Where the sessions run, if the tensors are on the CPU and the sessions are not."""
    saved: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    """Outputs that have a cotangent."""
    cotangents: tuple[str, ...] = ()
    """Inputs of the backward graph with these cotangents."""
    wrt: tuple[str, ...] = ()
    results: FlatResults | None = None
    """How the module returns the outputs; ``None`` if the caller arranges them."""
    constants: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Flags and counts among the inputs that the graph does not read, by position.

    The module may have branched on them in Python; another value needs another export.
    """
    order: tuple[int, ...] = ()
    """Index of each entry of ``parameters`` in the list of :func:`modes_and_parameters`."""

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the sizes match the fixed and symbolic sizes of the graph."""
        sizes: dict[str, int] = {}
        for t, dims in zip(tensors, self.dims, strict=True):
            for size, dim in zip(t.shape, dims, strict=True):
                expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
                if size != expected:
                    return False
        return all(torch.equal(tensors[i], value) for i, value in self.constants.items())


class Session:
    """An onnxruntime session with the names of its inputs and outputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        device: torch.device | Device,
        threads: int | None,
        folder: str | None = None,
    ) -> None:
        data = model.SerializeToString()
        self.session = runtime.create(
            data if folder is None else runtime.ModelWithWeightsFolder.of(data, folder),
            device=device if isinstance(device, Device) else str(device),
            threads=threads,
        )
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs = [o.name for o in self.session.get_outputs()]
        kinds = [x.type for x in (*self.session.get_inputs(), *self.session.get_outputs())]
        self.supports_numpy = not any("bfloat16" in kind for kind in kinds)
        """Whether numpy supports every input and output type; it lacks bfloat16."""


def compile_call(
    module: nn.Module,
    call: FlatArguments,
    differentiable: bool,
    threads: int | None,
    previous: Sequence[CompiledCall],
    save: Save,
) -> CompiledCall:
    """Export the module and split it into a forward and a backward session.

    Args:
        module: the module, in the training modes to run it in.
        call: the example inputs.
        differentiable: whether gradients are needed.
        threads: threads of onnxruntime.
        previous: compiled calls of the same kind; axes whose sizes differ from theirs become
            symbolic.
        save: called with the name of a stage and its model.
    """
    device = device_of(module, call.tensors)
    call = dataclasses.replace(call, tensors=detached_copy(call.tensors))
    results = FlatResults.of(module, call)
    model = _export(module, call, results, previous)
    save("torch_exported", model)
    parameters, initializers = _distinct_parameters(model)
    input_names = [x.name or "" for x in model.graph.inputs]
    dims = [
        [d if isinstance(d, int) else str(d) for d in x.shape or ()] for x in model.graph.inputs
    ]
    work = load_normalized(model).model
    if differentiable:
        save("optimized_pre_grad", work)
    graph = work.graph
    if results.count != len(graph.outputs):
        raise ExportError(
            f"{type(module).__name__} returns {results.count} tensors, "
            f"the exported graph has {len(graph.outputs)} outputs"
        )
    output_names = [y.name or "" for y in graph.outputs]
    portable_dropout(work, rng_input_name=RNG)
    updated_buffers = expose_statistics(work)
    _check_statistics_updated(model, updated_buffers)
    counters = _counters(module, updated_buffers)
    for name in reversed(results.buffers):
        updated_buffers[output_names.pop()] = name
    read = {
        f"{INNER_PREFIX}{n}": n
        for n, _ in module.named_buffers()
        if f"{INNER_PREFIX}{n}" in graph.initializers
    }
    lift(graph, [graph.initializers[n] for n in read])
    wrt = [
        n
        for n, t in zip(input_names, call.tensors, strict=True)
        if differentiable and t.requires_grad
    ]
    for name, at in zip(parameters, initializers, strict=True):
        if differentiable and at in graph.initializers and module.get_parameter(name).requires_grad:
            wrt.append(at)
    lift(graph, [graph.initializers[n] for n in initializers if n in graph.initializers])
    compiled = CompiledCall(
        forward=None,
        backward=None,
        inputs=input_names,
        dims=dims,
        shapes=[tuple(t.shape) for t in call.tensors],
        parameters=parameters,
        initializers=initializers,
        outputs=output_names,
        buffers=updated_buffers,
        counters=counters,
        read=read,
        random=any(x.name == RNG for x in graph.inputs),
        device=device,
        results=results,
        constants={
            i: t
            for i, (t, x) in enumerate(zip(call.tensors, model.graph.inputs, strict=True))
            if not x.uses() and t.numel() == 1 and not t.is_floating_point()
        },
        order=_order(module, parameters),
    )
    split_graphs(compiled, work, wrt, threads, save)
    return compiled


def _export(
    module: nn.Module, call: FlatArguments, results: FlatResults, previous: Sequence[CompiledCall]
) -> ir.Model:
    flat = FlatModule(module, call, results)
    names = [f"input_{i}" for i in range(len(call.tensors))]
    label = type(module).__name__
    # From most to least dynamic: some modules export only with fixed sizes.
    dynamic = _symbolic_axes(call, previous)
    batch_only = [{i: n for i, n in axes.items() if i == 0} for axes in dynamic]
    attempts = [dynamic]
    if batch_only != dynamic:
        attempts.append(batch_only)
    if any(batch_only):
        attempts.append([{} for _ in dynamic])
    for axes in attempts:
        try:
            return export_module(flat, call.tensors, names, axes, train=None, label=label)
        except ExportError as error:
            if axes is not attempts[-1]:
                continue
            if results.buffers:
                names = ", ".join(results.buffers)
                raise ExportError(
                    f"{label} changes its buffers in forward: {names}\n{error}"
                ) from error
            raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _symbolic_axes(call: FlatArguments, previous: Sequence[CompiledCall]) -> list[dict[int, str]]:
    """Name the first axes and those whose sizes changed; equal sizes share a name."""
    dynamic_axes = []
    for i, t in enumerate(call.tensors):
        axes = {
            axis: f"size_{size}"
            for axis, size in enumerate(t.shape)
            if axis == 0 or (size > 1 and any(p.shapes[i][axis] != size for p in previous))
        }
        dynamic_axes.append(axes)
    return dynamic_axes


def _distinct_parameters(model: ir.Model) -> tuple[list[str], list[str]]:
    """Return the distinct parameters: their names in the module, and their initializers."""
    by_initializer: dict[str, str] = {}
    for name, initializer in last_report(model).names.items():
        by_initializer.setdefault(initializer, name.removeprefix(INNER_PREFIX))
    return list(by_initializer.values()), list(by_initializer)


def expose_statistics(work: ir.Model) -> dict[str, str]:
    """Add the updated running statistics as outputs; return output -> buffer of the module."""
    op = OpBuilder(work.graph, "module/")
    updated_buffers: dict[str, str] = {}
    for buffer in running_statistics(work, op):
        out = op.Identity(buffer.new)
        out.name = f"{buffer.name}.out"
        work.graph.outputs.append(out)
        updated_buffers[out.name] = buffer.name.removeprefix(INNER_PREFIX)
    return updated_buffers


def _check_statistics_updated(model: ir.Model, updated_buffers: Mapping[str, str]) -> None:
    """Raise if normalizing the graph lost the training mode of a BatchNormalization."""
    wrt = {
        (x.name or "").removeprefix(INNER_PREFIX)
        for node in nodes(model.graph, "BatchNormalization", subgraphs=True)
        for x in node.inputs[3:]
        if x is not None
        and x.is_initializer()
        and (mode := node.attributes.get("training_mode")) is not None
        and mode.as_int()
    }
    lost = sorted(wrt - set(updated_buffers.values()))
    if lost:
        raise ExportError(f"training mode: the graph does not update {', '.join(lost[:5])}")


def split_graphs(
    compiled: CompiledCall,
    work: ir.Model,
    wrt: list[str],
    threads: int | None,
    save: Save = lambda stage, model: None,
) -> None:
    """Create the sessions of a call; ``wrt`` are the inputs of ``work`` that get a gradient."""
    floats = [
        y.name or "" for y in work.graph.outputs if y.name in compiled.outputs and S.is_float(y)
    ]
    device, folder = compiled.provider or compiled.device, weights_folder(work)
    target = device.target if isinstance(device, Device) else device.type
    if wrt and floats:
        parts = split(work, wrt, floats, target=target)
        save("optimized", parts.forward)
        save("execution_model", parts.backward)
        compiled.forward = Session(parts.forward, device, threads, folder)
        compiled.backward = Session(parts.backward, device, threads, folder)
        compiled.saved, compiled.passed, compiled.wrt = parts.saved, parts.passed, parts.wrt
        compiled.differentiable = parts.outputs
        names = [x.name for x in parts.backward.graph.input]
        compiled.cotangents = tuple(names[len(names) - len(parts.outputs) :])
    else:
        forward = finalize(simplify(work))
        save("optimized", forward)
        save("execution_model", forward)
        compiled.forward = Session(forward, device, threads, folder)


def modes_and_parameters(module: nn.Module) -> tuple[list[bool], list[nn.Parameter]]:
    """Return the training modes of all submodules and the distinct parameters, in one traversal."""
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
    positions = {p: i for i, p in enumerate(modes_and_parameters(module)[1])}
    return tuple(positions[module.get_parameter(n)] for n in names)


def _counters(module: nn.Module, updated_buffers: Mapping[str, str]) -> list[str]:
    known = dict(module.named_buffers())
    names = {
        f"{n.rpartition('.')[0]}.num_batches_tracked".removeprefix(".")
        for n in updated_buffers.values()
    }
    return [n for n in names if n in known]


def device_of(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of a call: that of its inputs, parameters and buffers."""
    tensors = [*inputs, *module.parameters(), *module.buffers()]
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise OnnxTrainError(
            f"inputs and parameters are on several devices: {names}\n"
            "hint: move them to one device with .to(device)"
        )
    device = next(iter(devices), torch.device("cpu"))
    check_device(device.type)
    return device


class CompiledFunction(torch.autograd.Function):
    """The forward and backward sessions of a compiled call as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledCall, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Run the forward session; save what the backward session reads."""
        named = dict(zip([*compiled.inputs, *compiled.initializers], tensors, strict=True))
        results = run_forward(compiled, module, named)
        outputs = [results[n] for n in compiled.outputs]
        # save_for_backward frees the tensors after backward and detects in-place changes.
        saved = {n: results[n] for n in compiled.saved}
        saved |= {n: named[n] for n in compiled.passed if n in named}
        kept = {n: x for n, x in saved.items() if isinstance(x, torch.Tensor)}
        ctx.save_for_backward(*kept.values())
        ctx.saved_names = list(kept)
        ctx.compiled = compiled
        ctx.others = {n: results[n] for n in compiled.passed if n not in named}
        ctx.others |= {n: x for n, x in saved.items() if n not in kept}  # sequences
        ctx.outputs = {n: (results[n].shape, results[n].dtype) for n in compiled.differentiable}
        ctx.mark_non_differentiable(
            *(results[n] for n in compiled.outputs if n not in compiled.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> Any:
        """Run the backward session."""
        # torch's `once_differentiable` notices a second derivative only if a cotangent needs one:
        # the gradient of `module(x).sum()` would be a constant without a word.
        if torch.is_grad_enabled():
            raise OnnxTrainError(
                "create_graph=True: the gradients of a module on ONNX Runtime cannot be "
                "differentiated again\n"
                "hint: leave the module whose gradient a penalty reads in torch; the others can be "
                "wrapped"
            )
        compiled: CompiledCall = ctx.compiled
        feeds = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True)) | ctx.others
        grads_by_output = dict(zip(compiled.outputs, grads, strict=True))
        for name, at in zip(compiled.differentiable, compiled.cotangents, strict=True):
            g = grads_by_output[name]
            if g is None:
                shape, dtype = ctx.outputs[name]
                g = torch.zeros(shape, dtype=dtype, device=compiled.device)
            feeds[at] = g
        assert compiled.backward is not None
        gradients = _run(compiled, compiled.backward, feeds)
        by_name = dict(zip(compiled.wrt, gradients.values(), strict=True))
        return (None, None, *(by_name.get(n) for n in (*compiled.inputs, *compiled.initializers)))


def run_forward(
    compiled: CompiledCall, module: nn.Module, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run the forward session and update the module's buffers; return all its outputs."""
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
    results = _run(compiled, compiled.forward, {**named, **others})
    if compiled.buffers or compiled.counters:
        with torch.no_grad():
            for out, name in compiled.buffers.items():
                buffers[name].copy_(results[out])
            for name in compiled.counters:
                buffers[name].add_(1)
    return {**others, **results}


def _run(
    compiled: CompiledCall, at: Session, feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if compiled.device.type == "cpu" and at.supports_numpy:
        # Arrays share memory as OrtValues do, and binding them takes a third of the time.
        arrays = {n: _each(to_array, feeds[n]) for n in at.inputs}
        results = runtime.run(at.session, at.outputs, arrays)
        return {n: _each(torch.from_numpy, a) for n, a in zip(at.outputs, results, strict=True)}
    values = {n: to_ortvalue(feeds[n]) for n in at.inputs}
    if compiled.device.type == "cpu":
        outputs = runtime.run_values(at.session, at.outputs, values)
    else:
        outputs = _run_bound(compiled, at, values)
    return {n: from_ortvalue(v) for n, v in zip(at.outputs, outputs, strict=True)}


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return the converted value, or for a sequence of tensors the converted elements."""
    return [convert(x) for x in value] if isinstance(value, list) else convert(value)


def _run_bound(compiled: CompiledCall, at: Session, values: Mapping[str, Any]) -> list[Any]:
    """Run with the outputs left on the device of the call."""
    binding = at.session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in at.outputs:
        binding.bind_output(name, compiled.device.type, compiled.device.index or 0)
    torch.cuda.current_stream(compiled.device).synchronize()
    runtime.run_bound(at.session, binding)
    return list(binding.get_outputs())


def to_array(t: torch.Tensor) -> np.ndarray:
    """Return an array that shares the tensor's memory; numpy does not support bfloat16."""
    if t.requires_grad:
        t = t.detach()
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def to_ortvalue(t: torch.Tensor) -> Any:
    """Return an OrtValue that shares the tensor's memory; keep the tensor alive meanwhile."""
    t = t.detach()
    if not t.is_contiguous():
        t = t.contiguous()
    kind = runtime.import_onnxruntime().OrtValue
    if t.device.type == "cpu" and t.dtype is not torch.bfloat16:
        return kind.ortvalue_from_numpy(t.numpy())
    return kind.from_dlpack(_BoolTensor(t) if t.dtype is torch.bool else t)


class _BoolTensor:
    """A bool tensor for onnxruntime's ``from_dlpack``: uint8 data, but ``dtype`` is bool."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype, self._bytes = t.dtype, t.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self._bytes.__dlpack__()


def from_ortvalue(value: Any) -> torch.Tensor:
    """Return a tensor that shares the OrtValue's memory and keeps it alive."""
    if value.device_name() == "cpu" and value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    t = torch.from_dlpack(value)
    return t.view(torch.bool) if value.data_type() == "tensor(bool)" else t
