"""``TrainingAgent``: forward and backward pass as two calls, on top of :func:`onnxtrain.split`.

>>> builder, config = OrtModuleGraphBuilder(), OrtModuleGraphBuilderConfiguration()
>>> config.initializer_names = config.initializer_names_to_train = ["fc.weight", "fc.bias"]
>>> builder.initialize(model, config)  # doctest: +SKIP
>>> builder.build()  # doctest: +SKIP
>>> session = onnxruntime.InferenceSession(builder.get_gradient_model())  # doctest: +SKIP

and ``TrainingAgent(session, ...)`` runs it. None of this needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    check_value,
    copy_of,
    write_fetches,
)
from onnxtrain.errors import OnnxTrainError, expected_one_of
from onnxtrain.runtime import session as runtime


class PartialGraphExecutionState:
    """The values that one forward pass saves for its backward pass; one object per pass."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None
        self._owner: TrainingAgent | None = None

    def _save(self, owner: TrainingAgent, values: dict[str, Any]) -> None:
        self._owner, self._values = owner, values

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
        feeds = as_list(feeds)
        feeds_by_name = self._check_feeds(feeds, self._feeds, self._inputs, "forward")
        names = [x.name for x in self._forward.get_outputs()]
        results = self._run(self._forward, names, feeds_by_name, "forward")
        parts = self._parts
        saved = {n: results[n] for n in parts.saved}
        for name, value in zip(self._feeds, feeds, strict=True):
            if name in parts.passed:
                # Programs often overwrite their arrays before the backward pass.
                array = isinstance(value, np.ndarray)
                saved[name] = as_value(value.copy(), self._device) if array else feeds_by_name[name]
        state._save(self, saved)
        # A later pass overwrites the tensors of a vector in place, but not what this one saves.
        shared = set() if isinstance(fetches, list) else set(parts.saved)
        write_fetches(
            fetches, [copy_of(results[n]) if n in shared else results[n] for n in parts.outputs]
        )

    def run_backward(
        self, feeds: Iterable[Any], fetches: Any, state: PartialGraphExecutionState
    ) -> None:
        """Write the gradients named by ``bw_fetches_names`` to ``fetches``.

        Args:
            feeds: gradients of the differentiable outputs, in their order.
            fetches: a list or an ``OrtValueVector``; elements that it has are overwritten.
            state: the state of the forward pass.
        """
        names = list(self._parts.cotangents)
        feeds_by_name = self._check_feeds(feeds, names, self._output_gradients, "backward")
        values = {**state._take(self), **feeds_by_name}
        known = {n: values[n] for n in self._output_gradients}
        gradients = list(dict.fromkeys(self._fetches))
        results = self._run(self._backward, gradients, known, "backward")
        write_fetches(fetches, [results[n] for n in self._fetches])

    def _check_feeds(
        self, feeds: Iterable[Any], names: list[str], known: dict[str, Any], what: str
    ) -> dict[str, Any]:
        values = [as_value(v, self._device) for v in as_list(feeds)]
        if len(values) != len(names):
            raise OrtError(
                f"Error in {what} pass execution: got {len(values)} values, expected {len(names)}\n"
                f"hint: pass them in this order: {', '.join(names)}"
            )
        for name, value in zip(names, values, strict=True):
            if name in known:
                check_value(value, known[name], what)
        return dict(zip(names, values, strict=True))

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
