"""Any ONNX file as a torch module: torch trains it, ONNX Runtime computes it.

:func:`as_module` loads a file as :class:`OnnxModule`. Its parameters are torch tensors that both
sessions read as inputs; frozen and quantized weights stay in the sessions. The graph is
differentiated once for each combination of training mode, ``requires_grad`` and device, by the
machinery of :class:`onnxtrain.torch.TrainableModule`.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.artifacts.build import check_inputs
from onnxtrain.artifacts.trainable import names_list, select_parameters
from onnxtrain.autodiff.gradients import Names, lift, normalize, registered_domains
from onnxtrain.autodiff.selection import batch_statistics, select_outputs
from onnxtrain.errors import OnnxTrainError, ShapeError, UncopiableError
from onnxtrain.graph.io import Source, load, save
from onnxtrain.graph.io.external_data import SharedWeights
from onnxtrain.graph.io.limits import resolve_within
from onnxtrain.graph.io.writer import all_tensors, bytes_writer, write_files
from onnxtrain.importer import Prepared, expose_weights
from onnxtrain.modes import to_evaluation, to_training, unshare_running_statistics
from onnxtrain.modes.randomness import portable_dropout
from onnxtrain.runtime.devices import Device, check
from onnxtrain.torch.module import (
    RNG,
    CompiledCall,
    CompiledFunction,
    device_of,
    expose_statistics,
    run_forward,
    split_graphs,
)
from onnxtrain.torch.synchronized import SynchronizedCall, has_peers, synchronize

_REBUILT = ("_bases", "_buffer_slots", "_compiled_calls", "_parameter_slots", "_result_type")
"""Attributes that a pickled module creates again."""


def as_module(
    model: Source,
    *,
    train: Names = None,
    freeze: Names = None,
    outputs: Names = None,
    threads: int | None = None,
    sync_batch_norm: bool = False,
    device: str | Device | None = None,
) -> OnnxModule:
    """Return an ONNX model as a torch module whose forward and backward run on ONNX Runtime.

    The module has the model's trainable weights as parameters, under their own names. Torch
    optimizers, DistributedDataParallel, Accelerate, Lightning and Hugging Face trainers train it as
    any other module, and :meth:`OnnxModule.to_onnx` writes the trained file.

    Args:
        model: a path, bytes, ``ModelProto``, ``ir.Model`` or the result of
            :func:`onnxtrain.lora`, whose adapters are then the parameters; it is not changed.
        train: names or globs of the weights that become parameters, as in :func:`onnxtrain.build`;
            by default all that train.
        freeze: names or globs of weights that stay in the sessions. ``requires_grad_(False)``
            freezes a parameter later.
        outputs: the outputs to return, or values inside the model such as the last hidden state; by
            default all outputs.
        threads: threads of onnxruntime; ``None`` uses all cores.
        sync_batch_norm: in a process group, let BatchNormalization in training mode use the
            statistics of all workers, as ``torch.nn.SyncBatchNorm`` does. Each normalization then
            runs in torch, between sessions for the nodes before and after it.
        device: execution provider that computes, such as ``"openvino"``, while parameters and
            inputs are torch's on the CPU. By default the sessions run where the inputs are:
            ``.to("cuda")`` moves them.

    >>> import onnxtrain.torch, os, torch
    >>> net = onnxtrain.torch.as_module(onnxtrain.examples.digits_model())
    >>> optimizer = torch.optim.AdamW(net.parameters())
    >>> loss = torch.nn.functional.cross_entropy(net(torch.rand(4, 64)), torch.arange(4))
    >>> loss.backward()
    >>> optimizer.step()
    >>> net.to_onnx("trained.onnx")
    >>> os.remove("trained.onnx")
    """
    return OnnxModule(
        model,
        train=train,
        freeze=freeze,
        outputs=outputs,
        threads=threads,
        sync_batch_norm=sync_batch_norm,
        device=device,
    )


def _provider(device: str | Device) -> Device:
    """Return the device of the sessions.

    Raises:
        OnnxTrainError: if its tensors are not in memory of the CPU.
    """
    found = check(device)
    if not found.on_host:
        raise OnnxTrainError(
            f'device={str(found)!r}: tensors would have to be there\nhint: .to("{found}")'
        )
    return found


class _Tensor(NamedTuple):
    """Where a parameter or buffer is: ``functional_call`` may replace it there."""

    name: str
    owner: nn.Module
    key: str

    @property
    def current(self) -> torch.Tensor:
        for tensors in (self.owner._parameters, self.owner._buffers):
            if (tensor := tensors.get(self.key)) is not None:
                return tensor
        return getattr(self.owner, self.key)  # computed by a parametrization


class OnnxModule(nn.Module):
    """An ONNX model as a torch module; :func:`as_module` documents the arguments.

    ``train()`` and ``eval()`` switch Dropout, and BatchNormalization with trainable scales, whose
    running statistics are buffers. Dropout draws its masks from torch's generator. Under autocast
    the module computes in the types of the file.
    """

    def __init__(
        self,
        model: Source,
        *,
        train: Names = None,
        freeze: Names = None,
        outputs: Names = None,
        threads: int | None = None,
        sync_batch_norm: bool = False,
        device: str | Device | None = None,
    ) -> None:
        super().__init__()
        self._settings = {"outputs": outputs, "threads": threads, "sync": sync_batch_norm}
        self._provider = None if device is None else _provider(device)
        self._path = os.fsdecode(model) if isinstance(model, str | os.PathLike) else None
        self._prepare(model)
        base = self._base
        statistics = batch_statistics(base.graph)
        for x in select_parameters(base, train, freeze):
            self._parameter_slots.append(self._add(x, trains=True))
        for x in base.graph.initializers.values():
            if x in statistics and all(x.name != p.name for p in self._parameter_slots):
                self._buffer_slots.append(self._add(x, trains=False))

    def _prepare(self, model: Source) -> None:
        """Load the model, without registering its tensors."""
        self._parameter_slots: list[_Tensor] = []
        self._buffer_slots: list[_Tensor] = []
        self._compiled_calls: dict[Any, CompiledCall | SynchronizedCall] = {}
        self._source, _ = expose_weights(load(model, allow_domains=registered_domains()))
        check_inputs(self._source)
        SharedWeights().take(self._source)  # frozen weights beyond the size of a protobuf
        unshare_running_statistics(self._source)
        self._bases: dict[str, Prepared] = {}
        base = self._base
        self.inputs = [x.name or "" for x in base.graph.inputs]
        """Names of the inputs, in the order of positional arguments."""
        self.outputs = [y.name or "" for y in base.graph.outputs]
        """Names of the outputs, in the order of results."""
        self._dtypes = {x.name or "": x.dtype for x in base.graph.inputs}
        fields = [re.sub(r"\W", "_", n) for n in self.outputs]
        self._result_type = collections.namedtuple("Outputs", fields, rename=True)  # noqa: PYI024

    @property
    def _base(self) -> Prepared:
        return self._normal_form("cpu")

    def _normal_form(self, target: str) -> Prepared:
        """Return the model with the requested outputs in the normal form for a target."""
        base = self._bases.get(target)
        if base is None:
            source, names = self._source.clone(), names_list(self._settings["outputs"])
            inner = {y.name: y for node in source.graph for y in node.outputs if y.name in names}
            if names and all(n in inner for n in names):
                source.graph.outputs[:] = [inner[n] for n in names]
            base = normalize(source, target, weights_exposed=True)
            if names:
                base.graph.outputs[:] = select_outputs(base, names)
            self._bases[target] = base
        return base

    def _add(self, x: ir.Value, *, trains: bool) -> _Tensor:
        """Register a tensor in a tree of modules: ``encoder.0.weight`` is in ``encoder``, ``0``.

        The dictionaries of ``nn.Module`` are filled directly, because its methods refuse names that
        are attributes, such as ``type``, and a name that is a prefix of another one.
        """
        assert x.const_value is not None
        assert x.name is not None
        *parts, key = x.name.split(".") if all(x.name.split(".")) else [x.name]
        owner: nn.Module = self
        for part in parts:
            owner = owner._modules.setdefault(part, nn.Module())  # pyright: ignore
        tensor = _to_tensor(x.const_value)
        if trains:
            owner._parameters[key] = nn.Parameter(tensor)
        else:
            owner._buffers[key] = tensor
        return _Tensor(x.name, owner, key)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Return the output, or a named tuple of several, for inputs by position or by name."""
        inputs = self._arguments(args, kwargs)
        parameters = [p.current for p in self._parameter_slots]
        compiled = self._compiled_call(inputs, parameters)
        names = [*self.inputs, *(p.name for p in self._parameter_slots)]
        feeds = dict(zip(names, (*inputs, *parameters), strict=True))
        if isinstance(compiled, SynchronizedCall):
            values = compiled.run(self, feeds)
        elif compiled.backward is None:
            results = run_forward(compiled, self, feeds)
            values = [results[n] for n in compiled.outputs]
        else:
            values = CompiledFunction.apply(compiled, self, *inputs, *parameters)
        return values[0] if len(self.outputs) == 1 else self._result_type(*values)

    def _arguments(
        self, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the inputs in order, in the types of the file under autocast.

        Raises:
            ShapeError: if an input is missing, unknown, given twice or of another type.
        """
        given = dict(zip(self.inputs, args, strict=False))
        twice = [n for n in kwargs if n in given]
        given |= kwargs
        missing = [n for n in self.inputs if n not in given]
        unknown = [n for n in kwargs if n not in self.inputs]
        if missing or unknown or twice or len(args) > len(self.inputs):
            problems = [
                f"{label}: {', '.join(names)}"
                for label, names in (("missing", missing), ("unknown", unknown), ("twice", twice))
                if names
            ]
            problems += [f"{len(args)} arguments"] if len(args) > len(self.inputs) else []
            raise ShapeError(
                f"the inputs do not fit: {'; '.join(problems)}\n"
                f"hint: the model takes {', '.join(self.inputs)}"
            )
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        inputs = []
        for name in self.inputs:
            value = torch.as_tensor(given[name])
            expected = _torch_dtype(self._dtypes[name])
            if cast and value.is_floating_point() and expected.is_floating_point:
                value = value.to(expected)
            if value.dtype != expected:
                raise ShapeError(
                    f"{name!r} is {value.dtype}, the model takes {expected}\n"
                    f"hint: {name}.to({expected})"
                )
            inputs.append(value)
        return inputs

    def _compiled_call(
        self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> CompiledCall | SynchronizedCall:
        """Return the sessions for this combination of modes, gradients and device."""
        wrt: list[str] = []
        if torch.is_grad_enabled():
            names = [*self.inputs, *(p.name for p in self._parameter_slots)]
            tensors = zip(names, (*inputs, *parameters), strict=True)
            wrt = [n for n, t in tensors if t.requires_grad]
        device = device_of(self, inputs)
        synchronized = bool(self.training and self._settings["sync"] and has_peers())
        key = (self.training, device, tuple(wrt), synchronized)
        if key not in self._compiled_calls:
            self._check_types(parameters)
            self._compiled_calls[key] = self._compile(wrt, device, synchronized=synchronized)
        return self._compiled_calls[key]

    def _check_types(self, parameters: Sequence[torch.Tensor]) -> None:
        initializers = self._base.graph.initializers
        for slot, p in zip(self._parameter_slots, parameters, strict=True):
            expected = _torch_dtype(initializers[slot.name].dtype)
            if p.dtype != expected:
                raise OnnxTrainError(
                    f"parameter {slot.name!r} is {p.dtype}, the model computes with {expected}\n"
                    "hint: the module cannot change its types; keep those of the file"
                )

    def _compile(
        self, wrt: list[str], device: torch.device, *, synchronized: bool
    ) -> CompiledCall | SynchronizedCall:
        provider = None
        if self._provider is not None:
            provider = check(self._provider)
            if device.type != "cpu":
                raise OnnxTrainError(
                    f"the tensors are on {device}, and the sessions run on {provider}\n"
                    'hint: .to("cpu") moves the module; as_module without device= runs on any GPU '
                    "of torch that onnxruntime has"
                )
        target = device.type if provider is None else provider.target
        work = self._normal_form(target).copy().model
        graph, parameters = work.graph, [p.name for p in self._parameter_slots]
        inputs = [x.name or "" for x in graph.inputs]
        outputs = [y.name or "" for y in graph.outputs]
        if self.training:
            to_training(work, trainable=set(parameters))
        else:
            to_evaluation(work)
        portable_dropout(work, rng_input_name=RNG, target=target)
        updated = expose_statistics(work) if self.training and not synchronized else {}
        buffers = [b.name for b in self._buffer_slots if b.name in graph.initializers]
        lift(graph, [graph.initializers[n] for n in (*buffers, *parameters)])

        def compile_stage(
            part: ir.Model, inputs: list[str], outputs: list[str], wrt: list[str]
        ) -> CompiledCall:
            compiled = CompiledCall(
                forward=None,
                backward=None,
                inputs=[n for n in inputs if n not in (RNG, *buffers, *parameters)],
                dims=[],
                shapes=[],
                parameters=(own := [n for n in parameters if n in inputs]),
                initializers=own,
                outputs=outputs,
                buffers=updated,
                counters=[],
                read={n: n for n in buffers if n in inputs},
                random=any(x.name == RNG for x in part.graph.inputs),
                device=device,
                provider=provider,
            )
            split_graphs(compiled, part, wrt, self._settings["threads"])
            return compiled

        if synchronized and (staged := synchronize(work, wrt, compile_stage)) is not None:
            return staged
        return compile_stage(work, [*inputs, *buffers, *parameters], outputs, wrt)

    def to_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the model with the current parameters and running statistics.

        If nothing has changed, the file is a copy of the original, byte by byte.
        """
        changed = dict(self._changes())
        if not changed and self._path is not None:
            _copy(Path(self._path), Path(path))
            return
        model = self._source.clone()
        for name, tensor in changed.items():
            model.graph.initializers[name].const_value = tensor
        save(model, path)

    def _changes(self) -> Iterator[tuple[str, ir.Tensor]]:
        """Yield the tensors that differ from those of the file."""
        for slot in (*self._parameter_slots, *self._buffer_slots):
            old = self._source.graph.initializers[slot.name].const_value
            assert old is not None
            value = slot.current.detach().cpu()
            if not torch.equal(_bits(value), _bits(_to_tensor(old))):
                array = _bits(value).numpy().view(old.dtype.numpy()).reshape(value.shape)
                yield slot.name, ir.Tensor(np.array(array), old.dtype, name=slot.name)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in _REBUILT:
            del state[name]
        state["_path"] = None
        try:
            state["_source"] = ir.to_proto(self._source).SerializeToString()
        except ValueError as error:
            raise UncopiableError(
                f"the module cannot be pickled: {error}\n"
                "hint: torch.save(module.state_dict(), path), or to_onnx(path)"
            ) from error
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state.pop("_source")
        super().__setstate__(state)
        self._prepare(source)
        tensors = dict(_slots(self))
        self._parameter_slots = [t for t in tensors.values() if t.key in t.owner._parameters]
        self._buffer_slots = [t for t in tensors.values() if t.key in t.owner._buffers]


def _slots(root: nn.Module) -> Iterator[tuple[str, _Tensor]]:
    """Yield where the parameters and buffers of a module are, by name."""
    for prefix, owner in root.named_modules():
        for key in (*owner._parameters, *owner._buffers):
            name = f"{prefix}.{key}" if prefix else key
            yield name, _Tensor(name, owner, key)


def _torch_dtype(dtype: ir.DataType | None) -> torch.dtype:
    assert dtype is not None
    if dtype == ir.DataType.BFLOAT16:
        return torch.bfloat16
    return torch.from_numpy(np.zeros((), dtype.numpy())).dtype


def _to_tensor(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return a copy of a tensor of the file."""
    array = np.array(tensor.numpy())
    if tensor.dtype == ir.DataType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: NaN equals NaN, and 0 is not -0."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def _copy(source: Path, target: Path) -> None:
    """Copy a model file and its external data."""
    if target.exists() and target.samefile(source):
        return
    data, folder = source.read_bytes(), target.absolute().parent
    tensors = all_tensors(onnx.load_from_string(data))
    locations = {e.value for t in tensors for e in t.external_data if e.key == "location"}
    for name in sorted(locations) if folder != source.absolute().parent else ():
        path = Path(resolve_within(source.parent / name, source.parent))
        copy = Path(resolve_within(folder / name, folder))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    folder.mkdir(parents=True, exist_ok=True)
    write_files(repr(str(target)), {str(target.absolute()): bytes_writer(data)})
