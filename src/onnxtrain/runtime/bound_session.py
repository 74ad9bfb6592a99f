"""A model bound to the memory that it reads and writes, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.values import ort_value

Arrays = Mapping[str, np.ndarray]
CONTROL = ("lr", "step", "rng", "grad_scale", "reset")


class BoundSession:
    """A session with bindings that are made once; each run brings only the batch.

    Args:
        session: runs the model.
        spec: describes it.
        inputs: what is read at each run, by name of the input.
        outputs: where results go, by name of the output; all others come back as arrays.
    """

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        for name, value in inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._small: dict[str, np.ndarray] = {}
        for t in spec.inputs_of(*CONTROL):
            sizes = [d for d in t.shape if isinstance(d, int)]
            array = np.zeros(sizes, numpy_dtype(t.dtype))
            self._small[t.name] = array
            self._binding.bind_ortvalue_input(t.name, ort_value(array))
        self._scalars: dict[str, np.ndarray] = {}
        self._fresh: list[str] = []
        for t in spec.outputs:
            if t.name in outputs:
                self._binding.bind_ortvalue_output(t.name, outputs[t.name])
            elif not t.shape and t.role in ("loss", "metric"):
                array = np.zeros((), numpy_dtype(t.dtype))
                self._scalars[t.name] = array
                self._binding.bind_ortvalue_output(t.name, ort_value(array))
            else:
                self._fresh.append(t.name)
        # Results come in the order in which outputs were bound first.
        self._bound = len(spec.outputs) - len(self._fresh)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run on a batch; return the outputs that have no place of their own."""
        for name, array in feeds.items():
            if name in self._small:
                self._small[name][...] = array
            elif array.dtype == ml_dtypes.bfloat16:
                self._binding.bind_ortvalue_input(name, ort_value(array))
            else:  # the same memory at a fifth of the price; the binding holds the array
                self._binding.bind_cpu_input(name, array)
        for name in self._fresh:
            # Again each time: the last result would be taken for memory to write to.
            self._binding.bind_output(name, "cpu")
        runtime.run_bound(self._session, self._binding)
        outputs = {name: np.array(array) for name, array in self._scalars.items()}
        if self._fresh:
            results = self._binding.get_outputs()[self._bound :]
            outputs.update({n: r.numpy() for n, r in zip(self._fresh, results, strict=True)})
        return outputs
