"""Hash everything the package generates, to prove that a change leaves it unchanged.

``python -m tests.artifact_hashes write FILE.json`` before a change and ``... compare FILE.json``
after it. ``write`` replaces the groups that it computes and keeps the others in the file.
``--only GROUP ...`` selects groups, ``--quick`` selects every k-th item of each group.
A run with ``--quick`` or ``--only`` can be compared with a full file.

Each generated file has up to three hashes:

    bytes    the unchanged file
    content  an ONNX model without metadata and doc strings; a manifest without notes; a checkpoint
             without its metadata
    graph    an ONNX model without the names of nodes and intermediate values as well

``compare`` reports the level of each difference: ``bytes`` (only metadata), ``content`` (only
names), or ``graph``. An item that raises is recorded by the type of its error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import runpy
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

import onnxtrain
from onnxtrain import losses, optim, profiles, targets, thresholds
from onnxtrain.compat.ort.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.text import without_cache
from onnxtrain.torch import export_gradient_graph, export_optimizer_graph, from_torch
from tests.adapters import decoders
from tests.artifacts import models as nets
from tests.cases.base import OpCase
from tests.cases.checks import nodes_of
from tests.cases.collect import CASES
from tests.cases.evaluate import is_float
from tests.compat import models as ort_nets
from tests.lowering.cases import CASES as LOWERING_CASES
from tests.lowering.single import OPSETS, lacking
from tests.lowering.single import model_of as lowering_model
from tests.lowering.zoo import GOALS, fixed_sizes
from tests.text.models import encoder, genai_folder, llama
from tests.text.words import write_tokenizer
from tests.zoo.export import Exported, export
from tests.zoo.models import ZOO, ZooModel

os.environ["ONNXTRAIN_CACHE"] = "0"
ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("bytes", "content", "graph")
BUILD_TARGETS = (*targets.TARGETS, *targets.BUNDLES)
FREE_TEXT = {"notes", "doc", "description"}
Hashes = dict[str, str]
Items = dict[str, Callable[[], Hashes]]


# Hashes of one file.


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def of_model(model: onnx.ModelProto, data: bytes | None = None) -> str:
    """The three hashes of a model."""
    whole = digest(data or model.SerializeToString(deterministic=True))
    bare = onnx.ModelProto.FromString(model.SerializeToString())
    _strip(bare)
    content = digest(bare.SerializeToString(deterministic=True))
    return f"{whole} {content} {digest(_structure(bare))}"


def _strip(thing: Any) -> None:
    """Remove metadata and doc strings, in place, at every depth."""
    for field, value in thing.ListFields():
        if field.name in ("metadata_props", "doc_string", "producer_version"):
            thing.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                _strip(part)


def _structure(model: onnx.ModelProto) -> bytes:
    """The model with inputs and outputs by name and everything else by its place."""
    imports = sorted((o.domain, o.version) for o in model.opset_import)
    functions = [f.SerializeToString(deterministic=True) for f in model.functions]
    return repr((model.ir_version, imports, _graph(model.graph, {}), functions)).encode()


def _graph(graph: onnx.GraphProto, outer: dict[str, Any]) -> list[Any]:
    seen: dict[str, Any] = {**outer, "": ""}
    public = [*graph.input, *graph.output]
    seen |= {v.name: v.name for v in public} if not outer else {}
    lines: list[Any] = (
        [v.SerializeToString(deterministic=True) for v in public] if not outer else []
    )

    def place(name: str) -> Any:
        return seen.setdefault(name, len(seen))

    lines += [place(v.name) for v in graph.input]
    for tensor in graph.initializer:
        lines.append((place(tensor.name), tensor.data_type, tuple(tensor.dims), _data(tensor)))
    for node in graph.node:
        inputs = [place(n) for n in node.input]
        attributes = [
            (a.name, _graph(a.g, seen))
            if a.HasField("g")
            else a.SerializeToString(deterministic=True)
            for a in sorted(node.attribute, key=lambda a: a.name)
        ]
        lines.append(
            (node.domain, node.op_type, inputs, attributes, [place(n) for n in node.output])
        )
    return [*lines, [place(v.name) for v in graph.output]]


def _data(tensor: onnx.TensorProto) -> str:
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("name")
    return digest(bare.SerializeToString(deterministic=True))


def of_file(path: Path, folder: Path) -> str:
    """The hashes of a file; the place of the folder counts for nothing."""
    data = path.read_bytes()
    if path.suffix == ".onnx":
        return of_model(onnx.ModelProto.FromString(data), data)
    if path.suffix in (".json", ".jsonl", ".csv", ".txt"):
        data = data.replace(str(folder).encode(), b"FOLDER")
    whole = digest(data)
    content = _json_content(data) if path.suffix == ".json" else _tensors(data)
    return whole if content is None else f"{whole} {content}"


def _json_content(data: bytes) -> str:
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k not in FREE_TEXT}
        return [bare(v) for v in value] if isinstance(value, list) else value

    return digest(json.dumps(bare(json.loads(data)), sort_keys=True).encode())


def _tensors(data: bytes) -> str | None:
    """The hash of a safetensors file without its metadata; ``None`` for other files."""
    if len(data) < 10 or data[8:9] != b"{":
        return None
    (size,) = struct.unpack("<Q", data[:8])
    if size > len(data) - 8:
        return None
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return digest(json.dumps(header, sort_keys=True).encode(), data[8 + size :])


def of_folder(folder: Path, without: tuple[str, ...] = ()) -> Hashes:
    """The hashes of all files in a folder, except those whose names match."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {
        p.relative_to(folder).as_posix(): of_file(p, folder)
        for p in files
        if not any(p.match(pattern) for pattern in without)
    }


def of_artifacts(artifacts: onnxtrain.Artifacts) -> Hashes:
    """The hashes of every file that ``save`` writes, and of every model in memory."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts.save(folder)
        hashes = of_folder(Path(folder))
    return hashes | {f"models/{key}": of_model(m) for key, m in artifacts.models.items()}


# Nets and the options to build them with.


def mean_square(op, *outputs):
    """The mean square of every float output, added up."""
    total = None
    for y in outputs:
        if y.dtype is not None and y.dtype.name in ("FLOAT", "DOUBLE"):
            term = op.ReduceMean(op.Mul(y, y), keepdims=0)
            total = term if total is None else op.Add(total, term)
    return total


@functools.lru_cache(maxsize=4)
def exported(name: str, mode: str = "eval") -> Exported:
    """A zoo model's export without stack traces, which have the folder of the checkout."""
    found = export(ZOO[name], mode)
    for node in nodes_of(found.model.graph):
        kept = [p for p in node.metadata_props if not p.key.endswith("stack_trace")]
        if len(kept) < len(node.metadata_props):
            pairs = [(p.key, p.value) for p in kept]
            node.ClearField("metadata_props")
            for key, value in pairs:
                node.metadata_props.add(key=key, value=value)
    return found


def build_zoo(name: str, mode: str = "eval", **options: Any) -> onnxtrain.Artifacts:
    settings = {"loss": mean_square, "optimizer": "adamw", **options}
    return onnxtrain.build(exported(name, mode).model, **settings)


def batch_size(name: str, mode: str = "eval") -> dict[str, int]:
    """A size for every symbolic first axis."""
    first = (x.type.tensor_type.shape.dim for x in exported(name, mode).model.graph.input)
    return {d[0].dim_param: 16 for d in first if d and d[0].dim_param}


def classifies(name: str) -> bool:
    outputs = exported(name).model.graph.output
    dims = outputs[0].type.tensor_type.shape.dim
    return len(outputs) == 1 and len(dims) == 2 and dims[1].dim_value > 1


FAST = [entry.name for entry in ZOO.values() if entry.fast]
MODES = [(entry.name, mode) for entry in ZOO.values() for mode in entry.modes]


# Groups: items by name; each gives the hashes of some files.


def group_exports() -> Items:
    """What torch exports; a difference here explains those elsewhere."""

    def item(name: str, mode: str) -> Hashes:
        model = onnx.ModelProto()
        model.CopyFrom(exported(name, mode).model)
        _strip(model)
        return {"model": of_model(model)}

    return {f"{n}-{m}": functools.partial(item, n, m) for n, m in MODES}


def group_zoo() -> Items:
    """Every zoo model for every target, and for several targets in one directory."""

    def item(name: str, mode: str, target: str) -> Hashes:
        return of_artifacts(build_zoo(name, mode, target=target))

    return {
        f"{n}-{m}/{t}": functools.partial(item, n, m, t) for n, m in MODES for t in BUILD_TARGETS
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"clip": 1.0, "ema": 0.99, "accumulate": 2, "metrics": ("grad_norm",)},
    "as-is": {"mode": "as-is"},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-cuda": {"precision": "bf16-mixed", "target": "cuda"},
    "dims-cpu": {"dims": None},
    "dims-cuda": {"dims": None, "target": "cuda"},
    "dims-cuda-bf16": {"dims": None, "target": "cuda", "precision": "bf16-mixed"},
    "dims-webgpu": {"dims": None, "target": "webgpu"},
    "dp": {"dp": onnxtrain.DP(clip=1.0, noise=1.0)},
    "fp16": {"precision": "fp16-mixed"},
    "fp16-cuda": {"precision": "fp16-mixed", "target": "cuda"},
    "native": {"randomness": "native"},
    "opset": {"opset": 15},
    "recompute": {"recompute": "auto"},
    "recompute-cuda": {"recompute": "auto", "target": "cuda"},
    "steps": {"steps_per_call": 8},
}


def group_options() -> Items:
    """The options of ``build`` on the fast zoo models, and all optimizers and losses on an MLP."""

    def item(name: str, options: dict[str, Any]) -> Hashes:
        if "dims" in options:
            options = {**options, "dims": batch_size(name)}
        return of_artifacts(build_zoo(name, **options))

    def labels(name: str, target: str) -> Hashes:
        if not classifies(name):
            return {}
        options = {"loss": "cross_entropy", "metrics": ("accuracy",), "target": target}
        return of_artifacts(build_zoo(name, **options))

    def classifier(**options: Any) -> Hashes:
        settings = {"loss": "cross_entropy", "optimizer": "sgd", "outputs": ["scores"], **options}
        if settings["loss"] != mean_square:
            settings["loss"] = [losses.LossTerm(settings["loss"], output="scores")]
        return of_artifacts(onnxtrain.build(nets.classifier(), **settings))

    items: Items = {"example": lambda: of_artifacts(nets.example())}
    for name in FAST:
        for label, options in OPTIONS.items():
            items[f"{name}/{label}"] = functools.partial(item, name, options)
        for target in BUILD_TARGETS:
            items[f"{name}/labels-{target}"] = functools.partial(labels, name, target)
    for target in ("cpu", "cuda", "webgpu"):
        for optimizer in optim.OPTIMIZERS:
            items[f"optimizer/{optimizer}/{target}"] = functools.partial(
                classifier, optimizer=optimizer, target=target
            )
        for loss in losses.LOSSES:
            items[f"loss/{loss}/{target}"] = functools.partial(classifier, loss=loss, target=target)
    return items


def gradient(case: OpCase, *, double: bool = False, dynamic: str = "", **options: Any):
    model = case.build(double, dynamic)
    outputs = [v.name for v in model.graph.output if is_float(v)]
    return onnxtrain.vjp(model, case.wrt, outputs, **options)


def group_vjp() -> Items:
    """The gradient of every op case: for every target, of symbolic sizes, and in float64."""

    def item(case: OpCase) -> Hashes:
        hashes = {t: attempt(gradient, case, target=t) for t in targets.TARGETS}
        hashes["float64"] = attempt(gradient, case, double=True)
        for extent in {"all": ("batch", "all"), "batch": ("batch",)}.get(
            case.dynamic.split(":")[0], ()
        ):
            hashes[f"dynamic-{extent}"] = attempt(gradient, case, dynamic=extent)
        return hashes

    return {case.name: functools.partial(item, case) for case in CASES}


def group_functions() -> Items:
    """``vjp``, ``split``, ``jvp`` and ``grad`` of whole models."""

    def wrt(name: str) -> list[str]:
        return list(exported(name).names.values())

    def item(name: str, target: str) -> Hashes:
        model = exported(name).model
        hashes = {"vjp": attempt(onnxtrain.vjp, model, wrt(name), target=target)}
        hashes["jvp"] = attempt(onnxtrain.jvp, model, wrt(name), target=target)
        try:
            halves = onnxtrain.split(model, wrt(name), target=target)
            hashes |= {"forward": of_model(halves.forward), "backward": of_model(halves.backward)}
        except Exception as error:
            hashes["split"] = of_error(error)
        artifacts = build_zoo(name, target=target)
        names = [p.name for p in artifacts.manifest.parameters]
        hashes["grad"] = attempt(
            onnxtrain.grad, artifacts.models["eval"], names, "loss", target=target
        )
        return hashes

    return {f"{n}/{t}": functools.partial(item, n, t) for n in FAST for t in targets.TARGETS}


def group_lower() -> Items:
    """Zoo models and operator cases for older opsets, runtimes and profiles."""

    def zoo(name: str) -> Hashes:
        model = exported(name).model
        batch = ZOO[name].batches[0]
        hashes = {}
        for goal in GOALS:
            dims = fixed_sizes(model, batch) if goal.static else {}
            hashes[str(goal)] = attempt(
                onnxtrain.lower, model, opset=goal.opset, dims=dims, verify=False
            )
        for profile in profiles.names():
            dims = fixed_sizes(model, 1)
            hashes[profile] = attempt(onnxtrain.lower, model, profile, dims=dims, verify=False)
        return hashes

    def case(item: Any) -> Hashes:
        model, runtime = lowering_model(item), lacking(item)
        symbolic = lowering_model(item, symbolic=True) if item.dynamic else None
        hashes = {}
        for opset in OPSETS:
            options = {"opset": opset, "verify": False}
            hashes[f"lacking-{opset}"] = attempt(onnxtrain.lower, model, runtime, **options)
            hashes[f"plain-{opset}"] = attempt(onnxtrain.lower, model, None, **options)
            if symbolic is not None:
                hashes[f"symbolic-{opset}"] = attempt(onnxtrain.lower, symbolic, runtime, **options)
        return hashes

    items: Items = {f"zoo/{n}": functools.partial(zoo, n) for n in ZOO}
    seen: Counter[str] = Counter()
    for c in LOWERING_CASES:
        seen[str(c)] += 1
        items[f"case/{c}" + (f".{seen[str(c)]}" if seen[str(c)] > 1 else "")] = functools.partial(
            case, c
        )
    return items


DECODERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "float32": lambda: llama(layers=1, int4=False),
    "int4": lambda: llama(layers=2, int4=True),
    "wide": lambda: llama(layers=1, heads=4, int4=True, seed=1),
}
TEXTS = ["the cat sat on the mat and looked at the dog"] * 6
TUNING = {"progress": False, "sample_tokens": 4, "lr": 0.01, "batch_size": 2, "threads": 1}
UNSTABLE = ("*.png", "*.lock", ".lock")  # a plot depends on matplotlib; a lock is empty


def group_finetune() -> Items:
    """Fine-tuning of small decoders and an encoder; training graphs of decoders with adapters."""

    def tuned(model: Callable[[], onnx.ModelProto], data: Any, **options: Any) -> Hashes:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            source = genai_folder(write_tokenizer(folder / "model"), model())
            onnxtrain.finetune(source, data, folder / "out", **{"epochs": 2, **TUNING, **options})
            return of_folder(folder / "out", UNSTABLE) | {
                # finetune.json has the place of the model
                "finetune.json": of_file(folder / "out" / "finetune.json", folder)
            }

    def classes() -> Hashes:
        rows = [
            {"text": f"the {animal} {verb} {place}", "label": animal}
            for animal in ("cat", "dog")
            for verb in ("sat", "ran", "looked")
            for place in ("on the mat", "to the house")
        ]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            write_tokenizer(folder / "model")
            onnx.save(encoder(), folder / "model" / "model.onnx")
            onnxtrain.finetune(
                folder / "model", rows, folder / "out", kind="classification", epochs=2, **TUNING
            )
            return of_folder(folder / "out", (*UNSTABLE, "finetune.json"))

    def adapted(family: str, int4: bool, target: str, **lora_options: Any) -> Hashes:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            decoder = decoders.write(folder / "model", int4=int4, family=family)
            model = onnxtrain.lora(decoder.path, rank=4, targets="all-linear", **lora_options)
            options = {"loss": "causal_lm", "optimizer": "adamw", "target": target}
            artifacts = onnxtrain.build(without_cache(model), **options)
            artifacts.save(folder / "artifacts")
            if target == "cpu":
                trainer = onnxtrain.Trainer(folder / "artifacts", seed=5, threads=1)
                model.export_peft(folder / "peft", trainer, base_model="base")
                if not lora_options:  # onnxruntime's adapter files cannot store DoRA's magnitudes
                    model.export_ort_adapter(folder / "adapter.onnx_adapter", trainer)
                    (folder / "base").mkdir()
                    model.export_ort_base(folder / "base" / "model.onnx")
                (folder / "merged").mkdir()
                model.export_merged(folder / "merged" / "model.onnx", trainer)
            return of_folder(folder)

    items: Items = {
        f"tuned/{n}": functools.partial(tuned, model, TEXTS) for n, model in DECODERS.items()
    }
    items["tuned/packed"] = functools.partial(
        tuned, DECODERS["int4"], TEXTS, pack=True, max_length=64, targets="all-linear"
    )
    items["tuned/weights"] = functools.partial(
        tuned, DECODERS["int4"], {"input_ids": [[5, 6, 7, 8]] * 4}, train="norm"
    )
    items["tuned/encoder"] = classes
    for target in BUILD_TARGETS:
        for label, family, int4, options in (
            ("llama-float32", "llama", False, {}),
            ("llama-int4", "llama", True, {}),
            ("phi3-int4", "phi3", True, {}),
            ("llama-dora", "llama", False, {"dora": True, "dropout": 0.1}),
        ):
            items[f"adapters/{label}/{target}"] = functools.partial(
                adapted, family, int4, target, **options
            )
    return items


def group_web() -> Items:
    """The files that the scripts of the web package's tests and of the site write."""
    scripts = sorted(ROOT.glob("web/packages/*/tests/fixtures/make_*.py"))

    def script(path: Path) -> dict[str, Any]:
        sys.path.insert(0, str(path.parent))
        try:
            return runpy.run_path(str(path))
        finally:
            sys.path.remove(str(path.parent))

    def whole(path: Path) -> Hashes:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as text:
            script(path)["main"](Path(text))
            return of_folder(Path(text), ("*stamp*",))

    def net(path: Path, name: str, draw: Any = None) -> Hashes:
        site = script(path)
        options = {"loss": "cross_entropy", "optimizer": "adamw", "target": "web"}
        if name == "writer":
            options |= {"loss": "causal_lm", "freeze": "mask"}
            return of_artifacts(onnxtrain.build(site[name](), **options))
        return of_artifacts(onnxtrain.build(site[name](8), **options, metrics=["accuracy"]))

    items: Items = {p.stem: functools.partial(whole, p) for p in scripts}
    site = ROOT / "web" / "site" / "make_artifacts.py"
    for name in ("cnn", "attention", "writer"):
        items[f"site/{name}"] = functools.partial(net, site, name)
    return items


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(10, 5)
        self.fc2 = torch.nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc2(torch.relu(self.fc1(x))))


def group_entry_points() -> Items:
    """``onnxtrain.compat.ort``, ``onnxtrain.torch``, and three training steps on the CPU."""

    def ort(model: Callable[[], onnx.ModelProto], wrt: list[str], **options: Any) -> Hashes:
        with tempfile.TemporaryDirectory() as folder:
            generate_artifacts(model(), requires_grad=wrt, artifact_directory=folder, **options)
            return of_folder(Path(folder))

    def ort_zoo(name: str) -> Hashes:
        names = list(exported(name).names.values())
        options = {"loss": LossType.MSELoss, "optimizer": OptimType.AdamW}
        return ort(lambda: exported(name).model, names, **options)

    def graphs(opset: int) -> Hashes:
        torch.manual_seed(0)
        module, loss = TwoLayers(), torch.nn.functional.mse_loss
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            x, y = torch.randn(6, 10), torch.randn(6, 1)
            export_gradient_graph(module, loss, x, y, folder / "gradient.onnx", opset)
            for name in optim.OPTIMIZERS:
                with contextlib.suppress(onnxtrain.errors.OnnxTrainError):
                    path = folder / f"{name}.onnx"
                    export_optimizer_graph(module.named_parameters(), name, path, opset)
            return of_folder(folder)

    def module(entry: ZooModel, target: str) -> Hashes:
        inputs = entry.inputs(entry.batches[0])
        model = from_torch(entry.build("eval"), inputs, train=False, dynamic_batch=not entry.static)
        settings = {"loss": mean_square, "optimizer": "adamw", "mode": "as-is", "target": target}
        return of_artifacts(onnxtrain.build(model, **settings))

    def trained(entry: ZooModel, optimizer: str) -> Hashes:
        artifacts = build_zoo(entry.name, optimizer=optimizer)
        trainer = onnxtrain.Trainer(artifacts, threads=1)
        names = [x.name for x in exported(entry.name).model.graph.input]
        values = [x.detach().numpy() for x in entry.inputs(entry.batches[0])]
        batch = {n: v for n, v in zip(names, values, strict=True) if n in trainer.inputs}
        found = [float(trainer.step(**batch).loss) for _ in range(3)]
        parameters = trainer.parameters
        data = [np.ascontiguousarray(parameters[n]).tobytes() for n in sorted(parameters)]
        return {"losses": digest(np.array(found).tobytes()), "parameters": digest(*data)}

    items: Items = {f"ort/{name}": functools.partial(ort_zoo, name) for name in FAST}
    for loss in LossType:
        for optimizer in OptimType:
            items[f"ort/mlp-{loss.name}-{optimizer.name}"] = functools.partial(
                ort,
                ort_nets.mlp,
                ort_nets.WEIGHTS[:3],
                frozen_params=ort_nets.WEIGHTS[3:],
                loss=loss,
                optimizer=optimizer,
            )
    for opset in (9, 12, 17, 21):
        items[f"gradient-graph/{opset}"] = functools.partial(graphs, opset)
    for name in FAST:
        for target in ("cpu", "cuda"):
            items[f"from-torch/{name}/{target}"] = functools.partial(module, ZOO[name], target)
        for optimizer in ("sgd", "adamw"):
            items[f"trained/{name}/{optimizer}"] = functools.partial(trained, ZOO[name], optimizer)
    return items


# Every threshold below 4096 is a count (of taps, channels, rows), every larger one of elements or
# bytes. The value gives the kind, not the name, so that renaming a threshold keeps the hashes.
VARIANTS: dict[str, Callable[[float], float]] = {
    "elements-1": lambda n: 1 if n >= 4096 else n,
    "elements-64": lambda n: 64 if n >= 4096 else n,
    "counts-2": lambda n: min(n, 2),
    "all-1": lambda n: 1,
    "divided": lambda n: max(1, n // 64),
    "counts-2-elements-huge": lambda n: 2 if n < 4096 else n * 4096,
}
THRESHOLD_NETS = (
    *(("bert", "eval"), ("llama", "eval"), ("swin", "eval"), ("transformer_lm", "eval")),
    *(("t5", "eval"), ("clip", "eval"), ("whisper", "eval"), ("llama_opset23", "eval")),
    *(("mobilenet_v3", "train"), ("resnext", "train"), ("efficientnet", "train")),
    *(("diffusion_unet", "eval"), ("convnext", "eval"), ("word2vec", "eval"), ("dlrm", "eval")),
)
THRESHOLD_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu-dims": {"dims": None},
    "cuda-bf16": {"target": "cuda", "precision": "bf16-mixed", "dims": None},
    "cuda": {"target": "cuda"},
    "wasm": {"target": "wasm"},
    "cpu": {},
    "cpu-labels": {"loss": "cross_entropy"},
    "cuda-labels": {"loss": "cross_entropy", "target": "cuda", "precision": "bf16-mixed"},
    "cuda-fp16": {"target": "cuda", "precision": "fp16-mixed", "dims": None},
}


@contextlib.contextmanager
def other_thresholds(change: Callable[[float], float]) -> Iterator[None]:
    """Change all thresholds, also where a module has imported one by name."""
    _import_all()
    found = {
        name: value
        for name, value in vars(thresholds).items()
        if name.isupper() and isinstance(value, int | float)
    }
    changed = []
    for module in [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "onnxtrain"]:
        for name, value in found.items():
            if module is not None and vars(module).get(name) is value:
                changed.append((module, name, value))
                setattr(module, name, change(value))
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@functools.cache
def _import_all() -> None:
    for module in pkgutil.walk_packages(onnxtrain.__path__, "onnxtrain.", onerror=lambda _: None):
        if not module.name.endswith("__main__") and ".probe." not in module.name:
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)


def group_thresholds() -> Items:
    """Small nets and op cases with other thresholds, so that what is for large models happens."""
    short = list(THRESHOLD_OPTIONS)[:3]

    def net(name: str, mode: str, variant: str, label: str) -> Hashes:
        options = dict(THRESHOLD_OPTIONS[label])
        if "loss" in options and not classifies(name):
            return {}
        if "dims" in options:
            options["dims"] = batch_size(name, mode)
        with other_thresholds(VARIANTS[variant]):
            return of_artifacts(build_zoo(name, mode, **options))

    def decoder(int4: bool, variant: str, label: str) -> Hashes:
        options = dict(THRESHOLD_OPTIONS[label]) | {"loss": "causal_lm", "optimizer": "sgd"}
        if "dims" in options:
            options["dims"] = {"batch_size": 2, "sequence_length": 16}
        with other_thresholds(VARIANTS[variant]):
            model = without_cache(llama(layers=1, int4=int4))
            return of_artifacts(onnxtrain.build(model, **options))

    def case(item: OpCase) -> Hashes:
        hashes = {}
        for variant, change in VARIANTS.items():
            with other_thresholds(change):
                for target in ("cpu", "cuda", "wasm"):
                    hashes[f"{variant}/{target}"] = attempt(gradient, item, target=target)
        return hashes

    nets = [(n, "eval", THRESHOLD_OPTIONS) for n in FAST]
    nets += [(n, m, short) for n, m in THRESHOLD_NETS if n in ZOO]
    items: Items = {
        f"net/{n}/{v}/{o}": functools.partial(net, n, m, v, o)
        for n, m, options in nets
        for v in VARIANTS
        for o in options
    }
    for v in VARIANTS:
        for o in THRESHOLD_OPTIONS:
            if "labels" not in o:
                items[f"decoder/float32/{v}/{o}"] = functools.partial(decoder, False, v, o)
                items[f"decoder/int4/{v}/{o}"] = functools.partial(decoder, True, v, o)
    return items | {f"case/{c.name}": functools.partial(case, c) for c in CASES}


# Models that tests make. Names of tests change, so that a model is found by its graph.

RECORD, STRIDE = "ARTIFACT_HASHES_RECORD", "ARTIFACT_HASHES_STRIDE"
TESTED = ("passes", "optimize", "autodiff")


def group_tests() -> Items:
    """Every model that onnxruntime loads in the tests of passes and rules; see the hooks below."""

    def item(folder: Path, stride: int) -> Hashes:
        with tempfile.TemporaryDirectory() as text:
            out = Path(text) / "models.json"
            command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:randomly"]
            command += ["-p", "no:cacheprovider", "-p", "tests.artifact_hashes", str(folder)]
            environment = {**os.environ, RECORD: str(out), STRIDE: str(stride)}
            subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
            return json.loads(out.read_text())

    folders = [ROOT / "tests" / name for name in TESTED]
    items = {f"{f.name}": functools.partial(item, f, 1) for f in folders if f.is_dir()}
    return items | {
        f"{n}-quick": functools.partial(f.func, f.args[0], 30) for n, f in items.items()
    }


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = items[:: int(os.environ.get(STRIDE, 1))]


def pytest_sessionstart() -> None:
    if RECORD in os.environ:
        original = onnxruntime.InferenceSession.__init__

        def recording(self: Any, model: Any, *args: Any, **options: Any) -> None:
            data = model if isinstance(model, bytes) else Path(model).read_bytes()
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].split("/")[-1]
            with contextlib.suppress(Exception):
                _, content, graph = of_model(onnx.ModelProto.FromString(data), data).split()
                _loaded.setdefault(graph, (set(), test))[0].add(content)  # bytes have stack traces
            original(self, model, *args, **options)

        onnxruntime.InferenceSession.__init__ = recording


def pytest_sessionfinish() -> None:
    if RECORD in os.environ:
        found = {g: f"{digest(*map(str.encode, sorted(w)))} # {t}" for g, (w, t) in _loaded.items()}
        Path(os.environ[RECORD]).write_text(json.dumps(found))


_loaded: dict[str, tuple[set[str], str]] = {}


GROUPS: dict[str, tuple[Callable[[], Items], int]] = {
    "exports": (group_exports, 12),
    "zoo": (group_zoo, 43),
    "options": (group_options, 37),
    "vjp": (group_vjp, 41),
    "functions": (group_functions, 23),
    "lower": (group_lower, 37),
    "finetune": (group_finetune, 9),
    "web": (group_web, 4),
    "entry_points": (group_entry_points, 29),
    "thresholds": (group_thresholds, 109),
    "tests": (group_tests, 1),
}
"""Each group, and which part of it ``--quick`` takes: every k-th item."""


# Running, writing and comparing.


def of_error(error: Exception) -> str:
    return f"error {type(error).__name__}"


def attempt(function: Callable[..., onnx.ModelProto], *args: Any, **options: Any) -> str:
    """The hashes of the model that a function returns, or the type of its error."""
    try:
        return of_model(function(*args, **options))
    except Exception as error:
        return of_error(error)


@functools.cache
def _items(group: str) -> Items:
    return GROUPS[group][0]()


def compute(job: tuple[str, str]) -> tuple[str, str, Hashes, float]:
    """The hashes of one item."""
    group, name = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            hashes = _items(group)[name]()
        except Exception as error:
            hashes = {"item": of_error(error)}
    return group, name, hashes, time.perf_counter() - start


def chosen(groups: list[str], quick: bool) -> list[tuple[str, str]]:
    """The items of the groups; the tests first, because they take longest."""
    jobs = []
    for group in sorted(groups, key=lambda g: g != "tests"):
        names = list(_items(group))
        if group == "tests":
            names = [n for n in names if n.endswith("-quick") == quick]
        jobs += [(group, n) for n in (names[:: GROUPS[group][1]] if quick else names)]
    return jobs


def record(jobs: list[tuple[str, str]], workers: int) -> dict[str, dict[str, Hashes]]:
    """The hashes of all jobs by group and item; prints how long each group took."""
    found: dict[str, dict[str, Hashes]] = {}
    seconds: Counter[str] = Counter()
    if workers > 1:
        pool = multiprocessing.get_context("spawn").Pool(workers)
        results: Any = pool.imap_unordered(compute, jobs)
    else:
        results = map(compute, jobs)
    start = time.perf_counter()
    for count, (group, name, hashes, spent) in enumerate(results, 1):
        found.setdefault(group, {})[name] = hashes
        seconds[group] += spent
        if count % 200 == 0:
            print(f"{time.perf_counter() - start:6.0f} s  {count} of {len(jobs)}", flush=True)
    for group, items in found.items():
        hashes = [h for files in items.values() for h in files.values()]
        errors = Counter(h.removeprefix("error ") for h in hashes if h.startswith("error"))
        refused = ", ".join(f"{n} {kind}" for kind, n in errors.most_common())
        print(
            f"{group:11}{len(items):6} items{len(hashes):7} keys{seconds[group]:7.0f} s"
            + (f"  errors: {refused}" if refused else "")
        )
    print(f"{time.perf_counter() - start:.0f} s")
    if workers > 1:
        pool.close()
        pool.join()
    return {g: dict(sorted(found[g].items())) for g in GROUPS if g in found}


def level(old: str | None, new: str | None) -> str:
    """Which hashes of a file differ: nothing, or one of LEVELS, or what it was and is."""
    old, new = (None if h is None else h.partition(" # ")[0] for h in (old, new))
    if old == new:
        return ""
    if old is None or new is None:
        return "missing" if new is None else "new"
    if "error" in old + new:
        return f"{old if 'error' in old else 'built'} -> {new if 'error' in new else 'built'}"
    a, b = old.split(), new.split()
    same = [x == y for x, y in zip(a, b, strict=False)]
    return LEVELS[max(i for i, equal in enumerate(same) if not equal)]


def compare(before: dict, after: dict, partly: bool) -> int:
    """Print what differs, by group and item; return how many keys do."""
    total = 0
    for group in GROUPS:
        old, new = before.get(group, {}), after.get(group, {})
        if group not in after or group not in before:
            print(f"{group}: not in the file" if group in after else f"{group}: not requested")
            continue
        tests: dict[str, str] = {}
        if group == "tests":
            for hashes in (*old.values(), *new.values()):
                tests |= {graph: value.partition(" # ")[2] for graph, value in hashes.items()}
            old, new = _by_graph(old), _by_graph(new)
            if partly:
                old = {n: files for n, files in old.items() if n in new}
        names = sorted(new if partly else {*old, *new})
        lines, count, kinds = [], 0, Counter()
        for name in names:
            a, b = old.get(name, {}), new.get(name, {})
            files = {f: level(a.get(f), b.get(f)) for f in sorted({*a, *b})}
            count += sum(not kind for kind in files.values())
            kinds.update(kind for kind in files.values() if kind)
            by_kind: dict[str, list[str]] = {}
            for file, kind in files.items():
                by_kind.setdefault(kind, []).append(file)
            name = f"graph {name} of {tests[name]}" if group == "tests" else name
            lines += [
                f"  {name}: {kind}: {', '.join(found)}" for kind, found in by_kind.items() if kind
            ]
        total += sum(kinds.values())
        what = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) or "equal"
        print(f"{group}: {count} keys equal" + (f"; different: {what}" if kinds else ""))
        print(*lines, sep="\n", end="\n" if lines else "")
    print("equal" if not total else f"{total} keys differ (the kinds are those of LEVELS)")
    return total


def _by_graph(items: dict[str, Hashes]) -> dict[str, Hashes]:
    """One item for each graph, whatever tests have made it."""
    found: dict[str, set[str]] = {}
    for files in items.values():
        for graph, value in files.items():
            found.setdefault(graph, set()).add(value)
    return {g: {"model": "+".join(sorted(v.split()[0] for v in vs))} for g, vs in found.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.artifact_hashes")
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--quick", action="store_true", help="every k-th item of each group")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, help="compare: write the new hashes, too")
    options = parser.parse_args(arguments)
    groups = [g for g in GROUPS if g in options.only]
    found = record(chosen(groups, options.quick), options.workers)
    if options.action == "write" or options.save:
        out = options.save or options.file
        before = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps({**before, **found}, indent=0, sort_keys=True) + "\n")
    if options.action == "write":
        return 0
    return 1 if compare(json.loads(options.file.read_text()), found, options.quick) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
