"""Artifacts and batches for the C++ programs, as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.checkpoint import to_bytes
from onnxtrain.optim import SGD, AdamW
from tests.cpp.ort_root import ROOT

_FIXTURES = ROOT / "web/packages/onnxtrain/tests/fixtures/make_fixtures.py"


def fixtures() -> Any:
    """Return the module that makes the nets of the web tests: the same ones are trained here."""
    spec = importlib.util.spec_from_file_location("web_fixtures", _FIXTURES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"optimizer": AdamW(lr=0.003), "clip": 1.0}),
    "mlp-sgd": ("mlp", {"optimizer": SGD(lr=0.05)}),
    "cnn": ("cnn", {"optimizer": SGD(lr=0.02, momentum=0.9)}),
    "transformer": ("transformer", {"optimizer": AdamW(lr=0.002), "ema": 0.99}),
    "accumulated": ("mlp", {"optimizer": AdamW(lr=0.01), "accumulate": 3}),
    "several": ("mlp", {"optimizer": AdamW(lr=0.003), "clip": 1.0, "steps_per_call": 4}),
    "fp16": ("mlp", {"optimizer": AdamW(lr=0.003), "precision": "fp16-mixed"}),
    "web": ("mlp", {"optimizer": AdamW(lr=0.003), "target": "web"}),
}
"""A net of the web tests by name, and options of ``build``."""
BATCHES = 20


def artifacts(name: str, folder: Path) -> Path:
    """Return a folder with the artifacts of a net."""
    net, options = NETS[name]
    module = fixtures()
    built = onnxtrain.build(
        module.MODELS[net][0](),
        loss="cross_entropy",
        metrics=["accuracy"],
        outputs=["logits"],
        **options,
    )
    built.save(folder)
    return folder


def batches(name: str, path: Path) -> list[dict[str, np.ndarray]]:
    """Return batches for a net, which are in a safetensors file afterwards."""
    draw, rng = fixtures().MODELS[NETS[name][0]][1], np.random.default_rng(11)
    first = "tokens" if NETS[name][0] == "transformer" else "x"
    rows = [{first: draw(rng), "labels": rng.integers(0, 4, 8)} for _ in range(BATCHES)]
    named = {f"{i}/{key}": array for i, row in enumerate(rows) for key, array in row.items()}
    path.write_bytes(to_bytes(named, {}))
    return rows
