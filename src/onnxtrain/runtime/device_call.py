"""A model bound to memory of a device: only the batch goes there, only the loss comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.values import ort_value

Arrays = Mapping[str, np.ndarray]


class DeviceSession:
    """A session whose bindings stay; the addresses too, so that a run can be captured.

    Args:
        session: runs the model.
        spec: describes it.
        inputs: what is read at each run, by name of the input.
        outputs: where results go, by name of the output; all others come back as arrays.
        device: where the session runs.
        graph_id: of the captured run, if the session captures; each binding has its own.
    """

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: str,
        graph_id: int | None = None,
    ) -> None:
        self._session, self._device = session, device
        self._binding = session.io_binding()
        for name, value in inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._fed: dict[str, tuple[np.ndarray, Any]] = {}
        self._fixed: dict[str, Any] = {}
        self._fresh: list[str] = []
        for t in spec.outputs:
            sizes = [d for d in t.shape if isinstance(d, int)]
            if t.name in outputs:
                self._binding.bind_ortvalue_output(t.name, outputs[t.name])
            elif len(sizes) == len(t.shape):
                value = ort_value(np.zeros(sizes, numpy_dtype(t.dtype)), device)
                self._fixed[t.name] = value
                self._binding.bind_ortvalue_output(t.name, value)
            else:
                self._fresh.append(t.name)
        # Results come in the order in which outputs were bound first.
        self._bound = len(spec.outputs) - len(self._fresh)
        self._options = None if graph_id is None else _capture(graph_id)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run on a batch; return the outputs that have no place of their own."""
        for name, array in feeds.items():
            self._feed(name, array)
        for name in self._fresh:
            # Again each time: the last result would be taken for memory to write to.
            self._binding.bind_output(name, "cpu")
        runtime.run_bound(self._session, self._binding, self._options)
        outputs = {name: np.array(value.numpy()) for name, value in self._fixed.items()}
        if self._fresh:
            results = self._binding.get_outputs()[self._bound :]
            outputs.update({n: r.numpy() for n, r in zip(self._fresh, results, strict=True)})
        return outputs

    def _feed(self, name: str, array: np.ndarray) -> None:
        known = self._fed.get(name)
        if known is None or known[0].shape != array.shape:
            own = np.array(array)  # where memory is shared, the caller's must not be written
            value = ort_value(own, self._device)
            self._binding.bind_ortvalue_input(name, value)
            self._fed[name] = (own, value)
            return
        last, value = known
        if array.size != 1:
            value.update_inplace(array)
        elif last.item() != array.item():  # a copy costs as much as a small kernel
            value.update_inplace(array)
            last[...] = array


def _capture(graph_id: int) -> Any:
    options = runtime.runtime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options
