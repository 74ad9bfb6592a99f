"""``TrainingAgent``: forward and backward pass as two calls, on top of :func:`onnxtrain.split`.

>>> builder, config = OrtModuleGraphBuilder(), OrtModuleGraphBuilderConfiguration()
>>> config.initializer_names = config.initializer_names_to_train = ["fc.weight", "fc.bias"]
>>> builder.initialize(model, config)  # doctest: +SKIP
>>> builder.build()  # doctest: +SKIP
>>> session = onnxruntime.InferenceSession(builder.get_gradient_model())  # doctest: +SKIP

and ``TrainingAgent(session, ...)`` runs it. None of this needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.compat.ort.graph_builder import (
    GradientGraphBuilder,
    GraphInfo,
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
    Parts,
    TrainingGraphTransformerConfiguration,
)
from onnxtrain.compat.ort.state import (
    as_list,
    as_value,
    fitting_value,
    own_value,
    write_fetches,
)
from onnxtrain.errors import OnnxTrainError, expected_one_of
from onnxtrain.runtime import session as runtime


class PartialGraphExecutionState:
    """The values that one forward pass saves for its backward pass; one object per pass."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None
        self._owner: TrainingAgent | None = None
        self.shapes: dict[str, list[int]] = {}
        """Shapes of the inputs as they were fed, and of the outputs."""

    def _save(
        self, owner: TrainingAgent, values: dict[str, Any], shapes: dict[str, list[int]]
    ) -> None:
        self._owner, self._values, self.shapes = owner, values, shapes

    def _take(self, owner: TrainingAgent) -> dict[str, Any]:
        if self._values is None:
            raise OrtError(
                "Error in backward pass execution: this state holds no forward pass\n"
                "hint: call run_forward with it before each run_backward"
            )
        if self._owner is not owner:
            raise OrtError("Error in backward pass execution: the state belongs to another agent")
        values, self._values = self._values, None
        return values


class OrtValueCache:
    """A cache of values by name; accepted for compatibility, the graphs here share no values."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def insert(self, node_arg_name: str, value: Any) -> None:
        """Add a value, unless the name exists."""
        self._values.setdefault(node_arg_name, value)

    def keys(self) -> list[str]:
        """Return the names."""
        return list(self._values)

    def count(self, node_arg_name: str) -> int:
        """Return 1 if the name exists, else 0."""
        return int(node_arg_name in self._values)

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()

    def remove(self, node_arg_name: str) -> None:
        """Remove one value."""
        if node_arg_name not in self._values:
            raise OrtError(f"NodeArg not found in cache: {node_arg_name}")
        del self._values[node_arg_name]


class TrainingAgent:
    """Run the forward and the backward pass of a model from ``OrtModuleGraphBuilder``.

    Several forward passes may precede their backward passes, in any order, each with its own state.

    Args:
        session: an ``InferenceSession``, or its ``_sess``, of ``get_gradient_model()``.
        fw_feed_names: names and order of the forward inputs: features, then weights.
        fw_outputs_device_info: accepted for compatibility; the session determines the device.
        bw_fetches_names: names and order of the gradients of a backward pass.
        bw_outputs_device_info: as ``fw_outputs_device_info``.
        local_rank: as ``fw_outputs_device_info``.

    Raises:
        CompatError: if the session's model is not from ``OrtModuleGraphBuilder``, or lacks an input
            or gradient.
    """

    def __init__(
        self,
        session: Any,
        fw_feed_names: Sequence[str],
        fw_outputs_device_info: Sequence[Any] | None = None,
        bw_fetches_names: Sequence[str] | None = None,
        bw_outputs_device_info: Sequence[Any] | None = None,
        local_rank: int = 0,
    ) -> None:
        del fw_outputs_device_info, bw_outputs_device_info, local_rank
        session = getattr(session, "_sess", session)
        self._parts = parts = Parts.of(session.model_meta.custom_metadata_map)
        device = "cuda" if "CUDAExecutionProvider" in session.get_providers() else "cpu"
        threads = session.session_options.intra_op_num_threads or None
        self._device = device
        self._forward = runtime.create(parts.forward, device=device, threads=threads)
        self._backward = runtime.create(parts.backward, device=device, threads=threads)
        self._inputs = {x.name: x for x in self._forward.get_inputs()}
        self._output_gradients = {x.name: x for x in self._backward.get_inputs()}
        self._feeds, known = list(fw_feed_names), [*parts.inputs]
        if sorted(self._feeds) != sorted(known):
            raise OrtError(
                f"fw_feed_names are {', '.join(self._feeds)}; the model has {', '.join(known)}"
            )
        self._fetches = list(parts.gradients if bw_fetches_names is None else bw_fetches_names)
        unknown = [n for n in self._fetches if n not in parts.gradients]
        if unknown:
            expected = expected_one_of(unknown[0], parts.gradients)
            raise OrtError(f"unknown gradient: {', '.join(unknown)} {expected}")

    def run_forward(
        self,
        feeds: Iterable[Any],
        fetches: Any,
        state: PartialGraphExecutionState,
        cache: OrtValueCache | None = None,
    ) -> None:
        """Write the outputs to ``fetches``, and save the values for backward in ``state``.

        Args:
            feeds: arrays or OrtValues, in the order of ``fw_feed_names``. Do not change
                OrtValues in place before the backward pass.
            fetches: a list or an ``OrtValueVector``; elements that it has are overwritten.
            state: a new state for this pass.
            cache: accepted for compatibility.
        """
        del cache
        parts, feeds = self._parts, as_list(feeds)
        dims = {n: x.shape for n, x in self._inputs.items()}
        given = self._values(feeds, self._feeds, self._inputs, "forward", dims)
        names = [x.name for x in self._forward.get_outputs()]
        results = self._run(self._forward, names, given, "forward")
        saved = {n: results[n] for n in parts.saved}
        for name, value in zip(self._feeds, feeds, strict=True):
            if name in parts.passed:
                # Programs often overwrite their arrays before the backward pass.
                array = isinstance(value, np.ndarray)
                saved[name] = own_value(given[name].numpy(), self._device) if array else given[name]
        # A later pass overwrites the tensors of a vector in place, but not what this one saves.
        shared = {*parts.outputs} & {*saved} if hasattr(fetches, "push_back") else ()
        outputs = {
            n: own_value(results[n].numpy(), self._device) if n in shared else results[n]
            for n in parts.outputs
        }
        fed = zip(self._feeds, feeds, strict=True)
        shapes = {n: list(as_value(v, self._device).shape()) for n, v in fed}
        state._save(self, saved, {**shapes, **{n: list(y.shape()) for n, y in outputs.items()}})
        write_fetches(fetches, list(outputs.values()))

    def run_backward(
        self, feeds: Iterable[Any], fetches: Any, state: PartialGraphExecutionState
    ) -> None:
        """Write the gradients named by ``bw_fetches_names`` to ``fetches``.

        Args:
            feeds: gradients of the differentiable outputs, in their order.
            fetches: a list or an ``OrtValueVector``; elements that it has are overwritten.
            state: the state of the forward pass.
        """
        parts, shapes = self._parts, state.shapes
        dims: dict[str, Sequence[Any]] = {n: x.shape for n, x in self._output_gradients.items()}
        outputs = zip(parts.cotangents, parts.differentiable, strict=True)
        dims |= {n: shapes[y] for n, y in outputs if y in shapes}
        given = self._values(feeds, parts.cotangents, self._output_gradients, "backward", dims)
        values = {**state._take(self), **given}
        known = {n: values[n] for n in self._output_gradients}
        results = self._run(self._backward, list(dict.fromkeys(self._fetches)), known, "backward")
        for name, x in zip(parts.gradients, parts.wrt, strict=True):
            # A gradient has the shape of what was fed.
            if name in results and list(results[name].shape()) != shapes[x]:
                array = results[name].numpy().reshape(shapes[x])
                results[name] = own_value(array, self._device)
        write_fetches(fetches, [results[n] for n in self._fetches])

    def _values(
        self,
        feeds: Iterable[Any],
        names: Sequence[str],
        known: Mapping[str, Any],
        what: str,
        dims: Mapping[str, Sequence[Any]],
    ) -> dict[str, Any]:
        values = [as_value(v, self._device) for v in as_list(feeds)]
        if len(values) != len(names):
            raise OrtError(
                f"Error in {what} pass execution: got {len(values)} values, expected {len(names)}\n"
                f"hint: pass them in this order: {', '.join(names)}"
            )
        flat = what == "backward"
        return {
            n: fitting_value(v, known[n], what, dims[n], flat=flat) if n in known else v
            for n, v in zip(names, values, strict=True)
        }

    def _run(self, session: Any, names: list[str], feeds: dict[str, Any], what: str) -> Any:
        input_names = {x.name for x in session.get_inputs()}
        feeds = {n: v for n, v in feeds.items() if n in input_names}
        try:
            if self._device == "cpu":
                outputs = runtime.run_values(session, names, feeds)
            else:
                binding = session.io_binding()
                for name, value in feeds.items():
                    binding.bind_ortvalue_input(name, value)
                for name in names:
                    binding.bind_output(name, self._device)
                runtime.run_bound(session, binding)
                outputs = binding.get_outputs()
        except OnnxTrainError as error:
            raise OrtError(f"Error in {what} pass execution: {error}") from error
        return dict(zip(names, outputs, strict=True))


__all__ = [
    "GradientGraphBuilder",
    "GraphInfo",
    "OrtModuleGraphBuilder",
    "OrtModuleGraphBuilderConfiguration",
    "OrtValueCache",
    "PartialGraphExecutionState",
    "TrainingAgent",
    "TrainingGraphTransformerConfiguration",
]
