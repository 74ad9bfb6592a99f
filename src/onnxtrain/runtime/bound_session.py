"""A model bound to the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnxtrain.manifest import ModelSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.memory import memory_of

Arrays = Mapping[str, np.ndarray]


class BoundSession:
    """A session with bindings that are made once; each run brings only the batch.

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
        device: str = "cpu",
        graph_id: int | None = None,
    ) -> None:
        self.session, self.binding = session, session.io_binding()
        self._memory = memory_of(device)
        for name, value in inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        self._memory.prepare(self.binding, spec)
        self._kept: dict[str, Callable[[], np.ndarray]] = {}
        self._fresh: list[str] = []
        for t in spec.outputs:
            if t.name in outputs:
                self.binding.bind_ortvalue_output(t.name, outputs[t.name])
            elif (place := self._memory.place(t)) is not None:
                value, self._kept[t.name] = place
                self.binding.bind_ortvalue_output(t.name, value)
            else:
                self._fresh.append(t.name)
        # Results come in the order in which outputs were bound first.
        self._bound = len(spec.outputs) - len(self._fresh)
        # Never on the CPU: with RunOptions a call costs ten times as much.
        self._options = None if graph_id is None else _capture(graph_id)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run on a batch; return the outputs that have no place of their own."""
        for name, array in feeds.items():
            self._memory.feed(self.binding, name, array)
        for name in self._fresh:
            # Again each time: the last result would be taken for memory to write to.
            self.binding.bind_output(name, "cpu")
        runtime.run_bound(self.session, self.binding, self._options)
        outputs = {name: read() for name, read in self._kept.items()}
        if self._fresh:
            results = self.binding.get_outputs()[self._bound :]
            outputs.update({n: r.numpy() for n, r in zip(self._fresh, results, strict=True)})
        return outputs


def _capture(graph_id: int) -> Any:
    options = runtime.runtime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options
