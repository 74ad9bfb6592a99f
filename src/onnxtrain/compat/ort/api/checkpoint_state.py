"""The state of a training run, as the old API shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from onnxtrain.compat.ort.errors import OrtError, OrtTypeError
from onnxtrain.compat.ort.store import Store, to_array


class Parameter:
    """A parameter of the model; reads and writes go to the state it belongs to."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """A copy of its value; setting it wants the same shape and type."""
        return self._store.array(self._name)

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._store.set(self._name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """Its gradient; zeros before the first step, ``None`` if it is frozen."""
        gradient = self._store.gradients.get(self._name)
        return None if gradient is None else to_array(gradient)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._name in self._store.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters by name, sorted."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Parameter:
        self._check(name)
        if name not in self._store.values:
            raise OrtError(
                f"The parameter {name} has no value yet. Please load the parameter states first"
            )
        return Parameter(self._store, name)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self._check(name)
        if self._store.nominal:
            raise OrtError(
                f"The parameter {name} cannot be set. Please load all the parameter states first"
            )
        self._store.set(name, value)

    def _check(self, name: str) -> None:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")

    def __contains__(self, name: object) -> bool:
        return name in self._store.trainable or name in self._store.frozen

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, self[name]) for name in self._store.parameters)

    def __len__(self) -> int:
        return len(self._store.parameters)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._store.parameters)})"


class Properties:
    """Numbers and texts that the user keeps with the state, by name, sorted."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._store.properties[name]

    def __setitem__(self, name: str, value: float | str) -> None:
        if isinstance(value, str):
            plain: int | float | str = value
        elif isinstance(value, bool | int | np.integer | np.bool_):
            plain = int(value)
        elif isinstance(value, float | np.floating):
            plain = float(np.float32(value))
        else:
            raise OrtTypeError(
                f"A property is an int, a float or a str, not {type(value).__name__}"
            )
        self._store.properties[name] = plain

    def __contains__(self, name: object) -> bool:
        return name in self._store.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        return iter(sorted(self._store.properties.items()))

    def __len__(self) -> int:
        return len(self._store.properties)

    def __repr__(self) -> str:
        return f"Properties({', '.join(sorted(self._store.properties))})"


class CheckpointState:
    """Parameters, gradients, optimizer state and properties of a training run.

    Made by :meth:`load_checkpoint`.
    """

    def __init__(self, state: Store) -> None:
        if not isinstance(state, Store):
            raise OrtTypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._state = state

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Return the state in a checkpoint: full or nominal, ours or onnxruntime-training's."""
        return cls(Store.load(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Write the state to a file; the learning rate always goes with it."""
        state._state.save(checkpoint_uri, optimizer=include_optimizer_state)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return Parameters(self._state)

    @property
    def properties(self) -> Properties:
        """The user's properties by name."""
        return Properties(self._state)

    @property
    def seed(self) -> int:
        """What dropout masks are drawn from, with the number of the step."""
        return self._state.seed

    @seed.setter
    def seed(self, value: int) -> None:
        if not 0 <= int(value) < 2**24:
            raise OrtError(f"The seed must be at least 0 and below 2**24: {value}")
        self._state.seed = int(value)
