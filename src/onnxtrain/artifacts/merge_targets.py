"""The forms of one training run for browsers, side by side."""

from __future__ import annotations

import dataclasses

from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.artifacts.signature import key_of
from onnxtrain.manifest import ModelSpec

FORMS = ("wasm", "webgpu")


def merge_targets(first: Artifacts, second: Artifacts) -> Artifacts:
    """Return artifacts with the models of both; parameters and state are the same tensors in both.

    A model of ``second`` that is spelled as the one of ``first`` shares its file.
    """
    one, two = first.manifest, second.manifest
    assert (one.parameters, one.buffers, one.state) == (two.parameters, two.buffers, two.state)
    models = dict(first.models)
    specs = list(one.models)
    for spec in two.models:
        if spec.role == "infer":
            continue
        same = next((m for m in one.models if key_of(m) == key_of(spec)), None)
        proto = second.models[key_of(spec)]
        if same is not None and _text(proto) == _text(first.models[key_of(same)]):
            specs.append(dataclasses.replace(spec, file=same.file))
            continue
        renamed = dataclasses.replace(spec, file=_named(spec))
        models[key_of(renamed)] = proto
        specs.append(renamed)
    return dataclasses.replace(
        first, manifest=dataclasses.replace(one, models=tuple(specs)), models=models
    )


def _named(spec: ModelSpec) -> str:
    return f"{spec.file.removesuffix('.onnx')}.{spec.target}.onnx"


def _text(proto: object) -> bytes:
    return proto.SerializeToString(deterministic=True)  # pyright: ignore[reportAttributeAccessIssue]
