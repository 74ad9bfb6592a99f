"""Manifests and checkpoints that lie, or were damaged."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.checkpoint import from_bytes, to_bytes

Json = dict[str, Any]
Edit = Callable[[Json], object]


def _step(data: Json, model: str = "step") -> Json:
    return next(m for m in data["models"] if m["role"] == model)


def _output(data: Json, role: str, model: str = "step") -> Json:
    return next(t for t in _step(data, model)["outputs"] if t["role"] == role)


def _input(data: Json, role: str, model: str = "step") -> Json:
    return next(t for t in _step(data, model)["inputs"] if t["role"] == role)


LIES: dict[str, Edit] = {
    "format 2": lambda d: d.update(format=2),
    "format as text": lambda d: d.update(format="1"),
    "no models": lambda d: d.update(models=[]),
    "models as object": lambda d: d.update(models={}),
    "unknown entry": lambda d: d.update(surprise=1),
    "accumulate 0": lambda d: d.update(accumulate=0),
    "accumulate -1": lambda d: d.update(accumulate=-1),
    "accumulate huge": lambda d: d.update(accumulate=2**70),
    "lr as text": lambda d: d["optimizer"].update(lr="fast"),
    "lr below 0": lambda d: d["optimizer"].update(lr=-1.0),
    "lr above float32": lambda d: d["optimizer"].update(lr=1e39),
    "no optimizer": lambda d: d.update(optimizer=None),
    "loss without output": lambda d: d["loss"].pop("output"),
    "checkpoint above": lambda d: d.update(checkpoint="../checkpoint"),
    "checkpoint absolute": lambda d: d.update(checkpoint="/etc/passwd"),
    "checkpoint with zero": lambda d: d.update(checkpoint="check\0point"),
    "checkpoint empty": lambda d: d.update(checkpoint=""),
    "file above": lambda d: _step(d).update(file="../step_model.onnx"),
    "file with backslash": lambda d: _step(d).update(file="..\\step_model.onnx"),
    "file of another model": lambda d: _step(d).update(file="eval_model.onnx"),
    "hash of nothing": lambda d: _step(d).update(sha256="0" * 64),
    "hash too short": lambda d: _step(d).update(sha256="abc"),
    "hash empty": lambda d: _step(d).update(sha256=""),
    "steps per call 0": lambda d: _step(d).update(steps_per_call=0),
    "role unknown": lambda d: _step(d).update(role="stepp"),
    "tensor role unknown": lambda d: _input(d, "parameter").update(role="weight"),
    "input twice": lambda d: _step(d)["inputs"].append(_step(d)["inputs"][0]),
    "input missing": lambda d: _step(d)["inputs"].pop(),
    "output missing": lambda d: _step(d)["outputs"].pop(),
    "output twice": lambda d: _step(d)["outputs"].append(_step(d)["outputs"][0]),
    "input of another name": lambda d: _input(d, "parameter").update(name="elsewhere"),
    "feeds nothing": lambda d: _output(d, "parameter").update(feeds="nothing"),
    "feeds the batch": lambda d: _output(d, "parameter").update(feeds="x"),
    "feeds no input": lambda d: _output(d, "parameter").update(feeds=None),
    "feeds a number": lambda d: _output(d, "parameter").update(feeds=3),
    "loss is a metric": lambda d: _output(d, "loss").update(role="metric"),
    "loss is a parameter": lambda d: _output(d, "loss").update(role="parameter"),
    "loss of many": lambda d: _output(d, "loss").update(shape=[1000000]),
    "loss of any size": lambda d: _output(d, "loss").update(shape=["n"]),
    "loss as int64": lambda d: _output(d, "loss").update(dtype="int64"),
    "parameter as int8": lambda d: _input(d, "parameter").update(dtype="int8"),
    "parameter as text": lambda d: _input(d, "parameter").update(dtype="str"),
    "batch as float64": lambda d: _input(d, "input").update(dtype="float64"),
    "batch of rank 70": lambda d: _input(d, "input").update(shape=[1] * 70),
    "parameter is a batch": lambda d: _input(d, "parameter").update(role="input"),
    "batch is a parameter": lambda d: _input(d, "input").update(role="parameter"),
    "lr as vector": lambda d: _input(d, "lr").update(shape=[1000]),
    "lr without shape": lambda d: _input(d, "lr").update(shape=[]),
    "step is lr": lambda d: _input(d, "step").update(role="lr"),
    "weight too large": lambda d: d["parameters"][0].update(shape=[2**31, 2**31, 2**31]),
    "weight of 4 PB": lambda d: d["parameters"][0].update(shape=[2**50]),
    "weight below 0": lambda d: d["parameters"][0].update(shape=[-1, 4]),
    "weight of other shape": lambda d: d["parameters"][0].update(shape=[3, 3]),
    "weight of zero rows": lambda d: d["parameters"][0].update(shape=[0, 2**62]),
    "weight as float64": lambda d: d["parameters"][0].update(dtype="float64"),
    "weight twice": lambda d: d["parameters"].append(d["parameters"][0]),
    "weight gone": lambda d: d["parameters"].pop(),
    "place outside": lambda d: d["parameters"][0]["locations"][0].update(offset=2**62),
    "place overflows": lambda d: d["parameters"][0]["locations"][0].update(offset=2**63 - 8),
    "place too small": lambda d: d["parameters"][0]["locations"][0].update(nbytes=1),
    "place below 0": lambda d: d["parameters"][0]["locations"][0].update(offset=-8),
    "place elsewhere": lambda d: d["parameters"][0]["locations"][0].update(file="step_model.onnx"),
    "state gone": lambda d: d["state"].pop(),
    "state of other shape": lambda d: d["state"][0].update(shape=[2]),
    "state called as a weight": lambda d: d["state"][0].update(name=d["parameters"][0]["name"]),
    "state without slot": lambda d: d["state"][0].pop("slot"),
    "in place of nothing": lambda d: _step(d).update(in_place=["nothing"]),
    "weights above": lambda d: d.update(weights="../weights.bin"),
    "weights not there": lambda d: d.update(weights="weights.bin"),
    "files as list": lambda d: d.update(files=[]),
}
"""What a stranger may have written; the checkpoint belongs to it."""

SEPARATE_LIES: dict[str, Edit] = {
    "sum of 4 TB": lambda d: _input(d, "accumulator", "train").update(shape=[2**40]),
    "sum of any size": lambda d: _input(d, "accumulator", "train").update(shape=["n", 48]),
    "sum of other shape": lambda d: _input(d, "accumulator", "train").update(shape=[3]),
    "sum as parameter": lambda d: _input(d, "accumulator", "train").update(role="parameter"),
    "parameter as sum": lambda d: _input(d, "parameter", "train").update(role="accumulator"),
    "gradient feeds the batch": lambda d: _output(d, "gradient", "train").update(feeds="x"),
    "gradient feeds nothing": lambda d: _output(d, "gradient", "train").update(feeds=None),
    "a gradient less": lambda d: _input(d, "gradient", "optimizer").update(role="state"),
    "a gradient more": lambda d: _input(d, "state", "optimizer").update(role="gradient"),
    "reset as float": lambda d: _input(d, "reset", "train").update(dtype="float32"),
    "scale as vector": lambda d: _input(d, "grad_scale", "optimizer").update(shape=[4]),
    "update without feeds": lambda d: _output(d, "parameter", "optimizer").update(feeds=None),
    "two losses": lambda d: _output(d, "metric", "train").update(role="loss"),
}
"""The same about the models that accumulate gradients."""

TEXTS = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "1e999",
    "deep": "[" * 100000,
    "deep objects": '{"a":' * 5000,
    "cut": '{"format": 1, "models": [',
    "NaN": '{"format": NaN}',
    "a comment": '{"format": 1} // manifest',
    "twice": '{"format": 1, "format": 1}',
    "a lone surrogate": '{"format": "\\ud800"}',
    "a control character": '{"format": "\t"}',
    "a trailing comma": '{"format": 1,}',
    "leading zero": '{"format": 01}',
    "a bad escape": '{"format": "\\x41"}',
}

PROGRESS: dict[str, Edit] = {
    "lr below 0": lambda m: m.update(lr=-0.1),
    "lr as text": lambda m: m.update(lr="0.1"),
    "step below 0": lambda m: m.update(step=-1),
    "step as float": lambda m: m.update(step=1.5),
    "step huge": lambda m: m.update(step=2**40),
    "seed huge": lambda m: m.update(seed=2**24),
    "properties as list": lambda m: m.update(properties=[1]),
    "property as list": lambda m: m.update(properties={"a": [1]}),
    "no manifest": lambda m: m.pop("manifest"),
    "no step": lambda m: m.pop("step"),
    "another optimizer": lambda m: m["manifest"]["optimizer"].update(name="sgd"),
    "another loss": lambda m: m["manifest"]["loss"].update(name="mse"),
    "manifest as text": lambda m: m.update(manifest="x"),
}


def copied(folder: Path, to: Path) -> Path:
    """Return a copy whose files are links to the same content."""
    to.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name not in ("manifest.json", "checkpoint"):
            os.link(path, to / path.name)
        else:
            (to / path.name).write_bytes(path.read_bytes())
    return to


def lies(folder: Path, out: Path, edits: dict[str, Edit]) -> Iterator[str]:
    """Write directories whose manifest lies; yield their names."""
    text = (folder / "manifest.json").read_text()
    tensors, meta = from_bytes((folder / "checkpoint").read_bytes())
    for name, edit in edits.items():
        data = json.loads(text)
        edit(data)
        place = copied(folder, out / name)
        (place / "manifest.json").write_text(json.dumps(data, sort_keys=True))
        for model in data["models"] if isinstance(data["models"], list) else ():
            model["sha256"] = ""
        known = {**meta, "manifest": {**data, "files": {}}}
        (place / "checkpoint").write_bytes(to_bytes(tensors, known))
        yield name


def texts(folder: Path, out: Path) -> Iterator[str]:
    """Write directories whose manifest is invalid; yield their names."""
    for name, source in TEXTS.items():
        (copied(folder, out / name) / "manifest.json").write_text(source)
        yield name


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one damage."""
    out, at = bytearray(data), rng.randrange(len(data))
    match rng.choice(("flip", "set", "cut", "repeat", "end")):
        case "flip":
            out[at] ^= 1 << rng.randrange(8)
        case "set":
            out[at] = (out[at] + rng.randrange(1, 256)) % 256
        case "cut":
            del out[at : at + rng.randrange(1, 40)]
        case "repeat":
            out[at:at] = out[at : at + rng.randrange(1, 40)]
        case _:
            del out[at:]
    return bytes(out)


def checkpoints(good: bytes, out: Path, count: int) -> Iterator[str]:
    """Write checkpoints that are damaged, or whole and wrong; yield their names."""
    rng = random.Random(3)
    tensors, meta = from_bytes(good)
    first = next(iter(tensors))
    files = {f"damage {i}": damaged(good, rng) for i in range(count)}
    for name, edit in PROGRESS.items():
        changed = json.loads(json.dumps(meta))
        edit(changed)
        files[name] = to_bytes(tensors, changed)
    files["a tensor less"] = to_bytes({k: v for k, v in tensors.items() if k != first}, meta)
    files["float64"] = to_bytes({**tensors, first: tensors[first].astype(np.float64)}, meta)
    files["other shape"] = to_bytes({**tensors, first: tensors[first].reshape(-1)[:1]}, meta)
    files["empty"] = b""
    files["eight bytes"] = b"\xff" * 8
    files["a long header"] = (2**62).to_bytes(8, "little") + b"{}"
    huge = '{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'
    files["a huge tensor"] = len(huge).to_bytes(8, "little") + huge.encode()
    for name, data in files.items():
        (out / f"{name}.ckpt").write_bytes(data)
        yield f"{name}.ckpt"
