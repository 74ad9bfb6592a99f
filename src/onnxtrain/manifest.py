"""The manifest: the contract between ``build`` and the trainers in Python, C++ and JavaScript.

It lists every input and output of every model with its role. Trainers look tensors up by role, not
by name. The file reads from the dataclasses of its entries and :class:`Manifest`, which converts to
and from JSON, to the validation of a manifest of unknown origin.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from onnxtrain.errors import CheckpointError

FORMAT = 1

ROLES = (
    *("input", "target", "parameter", "frozen", "buffer", "gradient", "accumulator", "state"),
    *("lr", "step", "rng", "grad_scale", "reset", "scalar", "loss", "metric", "output"),
)
MODEL_ROLES = (
    *("train", "eval", "optimizer", "step", "infer"),
    *("gradients", "scalars", "update"),
)
_OPTIONAL = ("in_place", "members")
"""Entries of a model that JSON omits if they are empty."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: str
    feeds: str | None = None
    """For an output: the input that it replaces in the next call."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model file."""

    role: str
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: str = "cpu"
    steps_per_call: int = 1
    sha256: str = ""
    members: tuple[str, ...] = ()
    """For an update over vectors: the parameters that it updates."""
    in_place: tuple[str, ...] = ()
    """Inputs whose buffers may also be bound to the outputs that feed them."""

    def is_for(self, name: str | None) -> bool:
        """Return whether the model is for a target; ``None`` means any."""
        return name is None or name == self.target

    def input(self, role: str) -> TensorSpec | None:
        """Return the first input with a role, or ``None``."""
        return next((t for t in self.inputs if t.role == role), None)

    def inputs_of(self, *roles: str) -> list[TensorSpec]:
        """Return the inputs with these roles, in order."""
        return [t for t in self.inputs if t.role in roles]

    def outputs_of(self, *roles: str) -> list[TensorSpec]:
        """Return the outputs with these roles, in order."""
        return [t for t in self.outputs if t.role in roles]


@dataclasses.dataclass(frozen=True)
class Location:
    """Position of the raw little-endian bytes of a tensor in a file."""

    file: str
    offset: int
    nbytes: int
    dtype: str = ""
    """Type of these bytes; empty if it is that of the tensor."""


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A parameter or buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    locations: tuple[Location, ...] = ()
    """Its bytes in the inference model, which exporting overwrites with trained values."""


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A state tensor of the optimizer."""

    name: str
    parameter: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    init: float


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a directory of artifacts."""

    models: tuple[ModelSpec, ...]
    parameters: tuple[WeightSpec, ...]
    buffers: tuple[WeightSpec, ...]
    state: tuple[StateSpec, ...]
    optimizer: Mapping[str, Any]
    loss: Mapping[str, Any]
    accumulate: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint: str = "checkpoint"
    weights: str | None = None
    """File of frozen weights that several models share; ``None`` without any."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """sha256 of the weights file."""
    format: int = FORMAT

    def model(self, role: str, target: str | None = None, steps: int = 1) -> ModelSpec | None:
        """Return the model with a role, for a target if given, or ``None``."""
        return next(
            (
                m
                for m in self.models
                if m.role == role and m.is_for(target) and m.steps_per_call == steps
            ),
            None,
        )

    def file_names(self) -> set[str]:
        """Return the names of the files that the manifest describes."""
        return set(_files(self))

    def to_json(self, *, hashes: bool = True) -> str:
        """Return the text of ``manifest.json``: sorted keys, one line per tensor and setting."""
        data = self.to_dict(hashes=hashes)
        return "{\n" + ",\n".join(f' "{k}": {_lines(data[k])}' for k in sorted(data)) + "\n}\n"

    def to_text(self, file: str) -> str:
        """Return the manifest of a single model, which its metadata contains, as compact JSON.

        Parameters, buffers and state are included if the model reads them; hashes are not.
        """
        models = tuple(m for m in self.models if m.file == file)
        roles = {t.role for m in models for t in (*m.inputs, *m.outputs)}
        stores_weights = "infer" in {m.role for m in models}
        packs_parameters = any(m.members for m in models)
        own = dataclasses.replace(
            self,
            models=models,
            parameters=self.parameters
            if stores_weights or packs_parameters or "parameter" in roles
            else (),
            buffers=self.buffers if stores_weights or "buffer" in roles else (),
            state=self.state if "state" in roles else (),
        )
        return json.dumps(own.to_dict(hashes=False), separators=(",", ":"), sort_keys=True)

    def to_dict(self, *, hashes: bool = True) -> dict[str, Any]:
        """Return the manifest as plain data."""
        data = json.loads(json.dumps(dataclasses.asdict(self)))
        for model in data["models"]:
            for name in _OPTIONAL:
                if not model[name]:
                    del model[name]
        for weight in (*data["parameters"], *data["buffers"]):
            for location in weight["locations"]:
                if not location["dtype"]:
                    del location["dtype"]
        if not hashes:
            data["files"] = {}
            for model in data["models"]:
                model["sha256"] = ""
        return data

    @classmethod
    def from_json(cls, text: str | bytes, label: str = "manifest.json") -> Manifest:
        """Read and validate a manifest.

        Raises:
            CheckpointError: if an entry is missing, unknown or invalid.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{label}: not JSON: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{label}: not an object")
        if data.get("format") != FORMAT:
            raise CheckpointError(
                f"{label}: format {data.get('format')!r}, this version reads {FORMAT}\n"
                "hint: build the artifacts again, or install the version that built them"
            )
        manifest = _read(cls, data, label)
        _check(manifest, label)
        return manifest


def _lines(value: Any, depth: int = 1) -> str:
    """Return JSON with one line for each object of a list."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return json.dumps(value, sort_keys=True)
    margin = " " * (depth + 1)
    if "inputs" not in value[0]:
        items = [json.dumps(item, sort_keys=True) for item in value]
    else:
        items = [
            "{\n"
            + ",\n".join(f'{margin} "{k}": {_lines(item[k], depth + 2)}' for k in sorted(item))
            + f"\n{margin}}}"
            for item in value
        ]
    return "[\n" + ",\n".join(margin + item for item in items) + "\n" + " " * depth + "]"


_NESTED: dict[str, type] = {
    "models": ModelSpec,
    "inputs": TensorSpec,
    "outputs": TensorSpec,
    "parameters": WeightSpec,
    "buffers": WeightSpec,
    "state": StateSpec,
    "locations": Location,
}
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "dtype", "role", "file", "target", "sha256", "parameter"), (str,)),
    **dict.fromkeys(("slot", "checkpoint"), (str,)),
    **dict.fromkeys(("feeds", "weights"), (str, type(None))),
    **dict.fromkeys(("offset", "nbytes", "steps_per_call", "accumulate", "format"), (int,)),
    **dict.fromkeys(("optimizer", "loss", "options", "files"), (dict,)),
    **dict.fromkeys(("shape", "aliases", *_OPTIONAL), (list,)),
    "init": (int, float),
}


def _read(kind: type, data: Any, where: str) -> Any:
    """Return the dataclass ``kind`` from JSON; ``where`` is the path for error messages."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: expected an object, got {type(data).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(data.keys() - fields.keys())
    if unknown:
        raise CheckpointError(f"{where}: unknown entries: {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in data:
            if (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                raise CheckpointError(f"{where}: {name!r} is missing")
            continue
        values[name] = _value(name, data[name], f"{where}: {name}")
    return kind(**values)


def _value(name: str, value: Any, where: str) -> Any:
    if name in _NESTED:
        if not isinstance(value, list):
            raise CheckpointError(f"{where}: expected a list")
        return tuple(_read(_NESTED[name], item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, _TYPES[name]) or (
        isinstance(value, bool) and bool not in _TYPES[name]
    ):
        raise CheckpointError(f"{where}: {value!r} has the wrong type")
    if isinstance(value, list):
        allowed = (int, str) if name == "shape" else (str,)
        if not all(isinstance(v, allowed) and not isinstance(v, bool) for v in value):
            raise CheckpointError(f"{where}: {value!r} has the wrong type")
        return tuple(value)
    return value


def _check(manifest: Manifest, label: str) -> None:
    """Check roles, references between tensors, and that files are inside the directory."""
    for model in manifest.models:
        if model.role not in MODEL_ROLES:
            raise CheckpointError(f"{label}: unknown model role {model.role!r}")
        inputs = {t.name for t in model.inputs}
        for tensor in (*model.inputs, *model.outputs):
            if tensor.role not in ROLES:
                raise CheckpointError(
                    f"{label}: {tensor.name!r} has the unknown role {tensor.role!r}"
                )
            if tensor.feeds is not None and tensor.feeds not in inputs:
                raise CheckpointError(
                    f"{label}: {tensor.name!r} feeds {tensor.feeds!r}, not an input"
                )
        _check_names(model, inputs, {p.name for p in manifest.parameters}, label)
    for name in _files(manifest):
        if name != name.strip() or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{label}: file name {name!r} is not plain")


def _check_names(model: ModelSpec, inputs: set[str], parameters: set[str], label: str) -> None:
    """Check that ``members`` are parameters and ``in_place`` are inputs of the model."""
    for known, names in ((parameters, model.members), (inputs, model.in_place)):
        unknown = sorted(set(names) - known)
        if unknown:
            raise CheckpointError(f"{label}: {model.file} names the unknown tensor {unknown[0]!r}")


def _files(manifest: Manifest) -> Iterator[str]:
    yield from (m.file for m in manifest.models)
    yield manifest.checkpoint
    yield from manifest.files
    if manifest.weights is not None:
        yield manifest.weights
    for weight in (*manifest.parameters, *manifest.buffers):
        yield from (location.file for location in weight.locations)
