"""Two ways to run a step, which give the same numbers.

``Fused`` runs one graph from old values to new ones and swaps two sets of buffers. ``Separate`` runs
gradients and update as two graphs; the update may write in place, which halves the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from onnxtrain.artifacts import Artifacts
from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.buffers import Arena
from onnxtrain.runtime.feeds import numpy_dtype

Arrays = Mapping[str, np.ndarray]
_RESULTS = ("loss", "metric", "output")


class Fused:
    """One graph per step, two sets of buffers in turn; they are never the same memory."""

    def __init__(self, artifacts: Artifacts, *, device: str, threads: int | None) -> None:
        spec = artifacts.manifest.model("step")
        assert spec is not None
        self.spec: ModelSpec = spec
        self.device = device
        self._session = runtime.create(artifacts.source("step"), device=device, threads=threads)
        start = {**artifacts.values, **artifacts.state}
        kept = {t.name: start[t.name] for t in spec.inputs if t.name in start}
        self._sets = [_Values(kept, device), _Values(kept, device)]
        self._now = 0
        self._scalars = _scalar_outputs(spec)
        self._bindings = [self._bind(0), self._bind(1)]

    def _bind(self, old: int) -> Any:
        binding = self._session.io_binding()
        for name, value in self._sets[old].items():
            binding.bind_ortvalue_input(name, value)
        for t in self.spec.outputs:
            if t.feeds is not None:
                binding.bind_ortvalue_output(t.name, self._sets[1 - old][t.feeds])
            elif t.name in self._scalars:
                binding.bind_ortvalue_output(t.name, self._scalars[t.name][1])
            else:
                binding.bind_output(t.name, "cpu")
        return binding

    def step(self, batch: Arrays, control: Arrays) -> dict[str, np.ndarray]:
        """Run one step; give loss, metrics and outputs."""
        binding = self._bindings[self._now]
        held = _bind_inputs(binding, batch, control)
        _run(self._session, binding)
        del held
        self._now = 1 - self._now
        return _results(self.spec, self._scalars, binding)

    def read(self, name: str) -> np.ndarray:
        """Give a copy of a parameter, buffer or state tensor."""
        return self._sets[self._now].read(name)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a parameter, buffer or state tensor."""
        self._sets[self._now].write(name, array)
        # What no step replaces must be the same in both sets.
        self._sets[1 - self._now].write(name, array)


class Separate:
    """A gradient graph that accumulates, and an optimizer graph."""

    def __init__(self, artifacts: Artifacts, *, device: str, threads: int | None) -> None:
        train, update = (artifacts.manifest.model(r) for r in ("train", "optimizer"))
        assert train is not None
        assert update is not None
        self.spec, self.update = train, update
        self.device = device
        self._train = runtime.create(artifacts.source("train"), device=device, threads=threads)
        # Two pools that spin on the same cores cost more than the update can gain.
        self._optimizer = runtime.create(artifacts.source("optimizer"), device=device, threads=1)
        start = {**artifacts.values, **artifacts.state}
        grads = {
            t.name: np.zeros(t.shape, numpy_dtype(t.dtype))  # pyright: ignore[reportArgumentType]
            for t in train.inputs
            if t.role == "accumulator"
        }
        own = {t.name for t in (*train.inputs, *update.inputs)}
        self._values = _Values({n: a for n, a in start.items() if n in own}, device)
        self._grads = [_Values(grads, device), _Values(grads, device)]
        self._now = 0
        buffers = {t.feeds: start[t.feeds] for t in train.outputs_of("buffer") if t.feeds}
        self._fresh_buffers = _Values(buffers, device)
        self._scalars = _scalar_outputs(train)
        self._steps = [self._bind_train(0), self._bind_train(1)]
        in_place = may_update_in_place(_proto(artifacts.source("optimizer")), update)
        changing = {t.feeds for t in update.outputs if t.feeds}
        spare = {n: start[n] for n in start if n in changing}
        self._spare = None if in_place else _Values(spare, device)
        self._updates = [self._bind_update(0), self._bind_update(1)]

    def _bind_train(self, old: int) -> Any:
        binding = self._train.io_binding()
        for t in self.spec.inputs:
            if t.role == "accumulator":
                binding.bind_ortvalue_input(t.name, self._grads[old][t.name])
            elif t.name in self._values:
                binding.bind_ortvalue_input(t.name, self._values[t.name])
        for t in self.spec.outputs:
            if t.role == "gradient":
                binding.bind_ortvalue_output(t.name, self._grads[1 - old][t.feeds or ""])
            elif t.role == "buffer":
                binding.bind_ortvalue_output(t.name, self._fresh_buffers[t.feeds or ""])
            elif t.name in self._scalars:
                binding.bind_ortvalue_output(t.name, self._scalars[t.name][1])
            else:
                binding.bind_output(t.name, "cpu")
        return binding

    def _bind_update(self, now: int) -> Any:
        binding = self._optimizer.io_binding()
        names = [t.name for t in self.spec.inputs if t.role == "accumulator"]
        grads = iter(names)
        for t in self.update.inputs:
            if t.role == "gradient":
                binding.bind_ortvalue_input(t.name, self._grads[now][next(grads)])
            elif t.name in self._values:
                binding.bind_ortvalue_input(t.name, self._values[t.name])
        target = self._values if self._spare is None else self._spare
        for t in self.update.outputs:
            binding.bind_ortvalue_output(t.name, target[t.feeds or ""])
        return binding

    def accumulate(self, batch: Arrays, control: Arrays) -> dict[str, np.ndarray]:
        """Run the gradient graph on one batch; give loss, metrics and outputs."""
        binding = self._steps[self._now]
        held = _bind_inputs(binding, batch, control)
        _run(self._train, binding)
        del held
        self._now = 1 - self._now
        for t in self.spec.outputs_of("buffer"):
            self._values.copy_from(t.feeds or "", self._fresh_buffers)
        return _results(self.spec, self._scalars, binding)

    def descend(self, control: Arrays) -> None:
        """Run the optimizer graph on the accumulated gradients."""
        binding = self._updates[self._now]
        held = _bind_inputs(binding, {}, control)
        _run(self._optimizer, binding)
        del held
        if self._spare is not None:
            for t in self.update.outputs:
                self._values.copy_from(t.feeds or "", self._spare)

    def gradients(self) -> dict[str, np.ndarray]:
        """Give copies of the accumulated gradients, by the name of the accumulator."""
        now = self._grads[self._now]
        return {name: now.read(name) for name in now}

    def read(self, name: str) -> np.ndarray:
        """Give a copy of a parameter, buffer or state tensor."""
        return self._values.read(name)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a parameter, buffer or state tensor."""
        self._values.write(name, array)


class _Values(Mapping[str, Any]):
    """Named tensors where the runtime reads and writes them."""

    def __init__(self, arrays: Arrays, device: str) -> None:
        ort = runtime.runtime()
        self._device = device
        self._arena = Arena(arrays)
        self._values = {
            n: ort.OrtValue.ortvalue_from_numpy(a, device, 0) for n, a in self._arena.items()
        }
        self._host = device == "cpu" and all(
            v.data_ptr() == self._arena[n].ctypes.data
            for n, v in self._values.items()
            if self._arena[n].size
        )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def read(self, name: str) -> np.ndarray:
        return np.array(self._arena[name] if self._host else self._values[name].numpy())

    def write(self, name: str, array: np.ndarray) -> None:
        if name not in self._values:
            return
        if self._host:
            self._arena[name][...] = array
        else:
            self._values[name].update_inplace(np.ascontiguousarray(array))

    def copy_from(self, name: str, other: _Values) -> None:
        if self._host:
            self._arena[name][...] = other._arena[name]
        else:
            self.write(name, other.read(name))


def _scalar_outputs(spec: ModelSpec) -> dict[str, tuple[np.ndarray, Any]]:
    ort = runtime.runtime()
    found = {}
    for t in spec.outputs:
        if t.role in ("loss", "metric") and all(isinstance(d, int) for d in t.shape):
            array = np.zeros(t.shape, numpy_dtype(t.dtype))  # pyright: ignore[reportArgumentType]
            found[t.name] = (array, ort.OrtValue.ortvalue_from_numpy(array))
    return found


def _bind_inputs(binding: Any, batch: Arrays, control: Arrays) -> list[Any]:
    """Bind the arrays of this call; give what must outlive it."""
    ort = runtime.runtime()
    held = []
    for name, array in (*batch.items(), *control.items()):
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, value)
        held.append((array, value))
    return held


def _run(session: Any, binding: Any) -> None:
    try:
        # No RunOptions: with them a call costs ten times as much.
        session.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime's errors share no base class
        text = (str(error).strip().splitlines() or [""])[0]
        raise runtime.OnnxTrainError(f"onnxruntime: {text}") from error


def _results(
    spec: ModelSpec, scalars: Mapping[str, tuple[np.ndarray, Any]], binding: Any
) -> dict[str, np.ndarray]:
    found = {name: np.array(array) for name, (array, _) in scalars.items()}
    others = [t.name for t in spec.outputs if t.role in _RESULTS and t.name not in scalars]
    if others:
        names = [t.name for t in spec.outputs]
        values = binding.get_outputs()
        found.update({n: values[names.index(n)].numpy() for n in others})
    return found


def may_update_in_place(model: onnx.ModelProto, spec: ModelSpec) -> bool:
    """Tell whether each new value may overwrite the old one while the graph runs.

    It may if every node that reads the old value comes before the node that writes the new one, in any
    order the runtime may choose: it is that node or one of its ancestors.
    """
    makers = {y: i for i, node in enumerate(model.graph.node) for y in node.output}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(model.graph.node):
        for x in node.input:
            readers.setdefault(x, []).append(i)
    for t in spec.outputs:
        if t.feeds is None:
            continue
        writer = makers.get(t.name)
        if writer is None:
            return False
        ancestors, pending = {writer}, [writer]
        while pending:
            for x in model.graph.node[pending.pop()].input:
                maker = makers.get(x)
                if maker is not None and maker not in ancestors:
                    ancestors.add(maker)
                    pending.append(maker)
        if not set(readers.get(t.feeds, ())) <= ancestors:
            return False
        # The writer itself must be elementwise, or it could overwrite what it still has to read.
        if (
            t.feeds in model.graph.node[writer].input
            and model.graph.node[writer].op_type not in _ELEMENTWISE
        ):
            return False
    return True


_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Identity", "Max", "Min", "Where"})


def _proto(source: bytes | str) -> onnx.ModelProto:
    if isinstance(source, str):
        return onnx.load(source, load_external_data=False)
    return onnx.load_from_string(source)
