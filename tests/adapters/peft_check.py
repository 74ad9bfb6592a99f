"""Adapters of files against torch and PEFT: runs where torch, transformers and peft are installed.

``python -m tests.adapters.peft_check FOLDER [family-precision ...]`` looks at files that
onnxruntime-genai's builder made (``FOLDER/genai``) of torch originals (``FOLDER/checkpoints``), and
prints one line of JSON for each: the largest differences found.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import peft
import torch
import transformers

import onnxtrain
from onnxtrain.adapters import Adapted
from onnxtrain.adapters.layers import (
    EMBEDDING,
    TargetModule,
    find_base_layers,
    find_target_modules,
    frozen_weight,
)
from onnxtrain.losses import CrossEntropy, LossTerm

IGNORED = -100
ort.set_default_logger_severity(3)


def check(file: Path, checkpoint: Path, **options: Any) -> dict[str, float]:
    """Return the largest relative differences of logits and gradients from torch with PEFT."""
    exact = without_rounding(file)
    adapted = onnxtrain.lora(
        exact, **{"rank": 4, "targets": "all-linear", "family": family_of(file), **options}
    )
    adapted = adapted.with_parameters(drawn(adapted))
    with tempfile.TemporaryDirectory() as folder:
        adapted.export_peft(folder)
        model = original(adapted, checkpoint)
        torch_model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
        torch_model.eval()
        feeds = batch(exact)
        labels = np.where(feeds["attention_mask"] == 1, feeds["input_ids"], IGNORED)
        logits, gradients = run_torch(torch_model, feeds, labels)
        with torch_model.disable_adapter():
            plain, _ = run_torch(torch_model, feeds, None)
        valid = feeds["attention_mask"] == 1
        result = {
            "without_adapter": difference(run(adapted.plain, feeds)[valid], plain[valid]),
            "logits": difference(run(adapted.model, feeds)[valid], logits[valid]),
            "gradients": worst_gradient(adapted, feeds, labels, gradients),
        }
        if not adapted.dora:
            served = run_served(adapted, feeds, Path(folder))
            result["onnx_adapter"] = difference(served[valid], logits[valid])
        merged = adapted.merge(quantized="requantize" if adapted.dora else "branch").model
        if not (adapted.dora and "int4" in str(file)):
            result["merged"] = difference(run(merged, feeds)[valid], logits[valid])
        again = onnxtrain.load_adapter(exact, folder, family=adapted.family)
        result["loaded"] = difference(run(again.model, feeds)[valid], logits[valid])
    return result


def family_of(file: Path) -> str:
    """Return the kind of model that a directory of the builder holds."""
    return json.loads((file.parent / "genai_config.json").read_text())["model"]["type"]


def without_rounding(file: Path) -> ir.Model:
    """Return the file with products that do not round their input, to be compared with floats."""
    model = onnxtrain.load(file)
    for node in model.graph:
        node.attributes.pop("accuracy_level", None)
        node.attributes.pop("sliding_window_cache", None)  # it wants caches of a fixed size
    return model


def drawn(adapted: Adapted) -> dict[str, np.ndarray]:
    """Return values for all factors, so that every branch counts."""
    rng = np.random.default_rng(5)
    values = adapted.parameters
    return {
        n: values[n] * rng.uniform(0.8, 1.2, values[n].shape)
        if n.endswith("magnitude")
        else rng.standard_normal(values[n].shape) * 0.1
        for n in values
    }


def original(adapted: Adapted, checkpoint: Path) -> Any:
    """Return the torch model with the very weights of the file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    modules = dict(model.named_modules())
    for target in find_target_modules(find_base_layers(adapted.plain.graph), adapted.family):
        if target.module in modules:
            weight = modules[target.module].weight
            array = torch.from_numpy(weight_of(target).copy())
            if target.kind == EMBEDDING:
                continue
            assert weight.shape == array.shape, target.module
            with torch.no_grad():
                weight.copy_(array)
        else:
            raise AssertionError(f"torch has no {target.module}")
    return model


def weight_of(target: TargetModule) -> np.ndarray:
    """Return the weights of a target, [outputs, inputs]."""
    parts = [frozen_weight(s.layer)[:, s.start : s.start + s.width] for s in target.slices]
    whole = parts[0] if target.kind == EMBEDDING else np.concatenate(parts, axis=1)
    return whole if target.kind == EMBEDDING else whole.T


def batch(model: ir.Model) -> dict[str, np.ndarray]:
    """Return inputs for a decoder with empty caches; the second row is padded on the right."""
    rows, length = 2, 7
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, (rows, length)).astype(np.int64)
    mask = np.ones((rows, length), np.int64)
    mask[1, -2:] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    for x in model.graph.inputs:
        name = x.name or ""
        if name == "position_ids":
            feeds[name] = np.tile(np.arange(length), (rows, 1))
        elif name.startswith("past") and x.shape is not None and len(x.shape) == 3:
            sizes = [int(str(n)) for n in x.shape[1:]]  # the state of a short convolution
            feeds[name] = np.zeros((rows, *sizes), np.float32)
        elif name.startswith("past"):
            assert x.shape is not None
            heads = x.shape[1]
            width = x.shape[3] if isinstance(x.shape[3], int) else head_size(model)
            feeds[name] = np.zeros((rows, int(str(heads)), 0, int(str(width))), np.float32)
    return feeds


def head_size(model: ir.Model) -> int:
    """Return the width of a head, where caches have a symbolic size."""
    attention = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    layer = next(x for x in find_base_layers(model.graph) if x.module.endswith("o_proj"))
    return layer.inputs // attention.attributes.get_int("num_heads", 1)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of a model on stock onnxruntime."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(["logits"], feeds)[0]


def run_served(adapted: Adapted, feeds: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Return the logits of the base file with an adapter file, as onnxruntime serves them."""
    base = adapted.export_ort_base(folder / "base.onnx")
    adapted.export_ort_adapter(folder / "a.onnx_adapter")
    session = ort.InferenceSession(str(base))
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(folder / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    return session.run(["logits"], feeds, run_options=options)[0]


def run_torch(
    model: Any, feeds: dict[str, np.ndarray], labels: np.ndarray | None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return logits, and gradients of all factors by PEFT's names without the adapter's."""
    ids, mask = (torch.from_numpy(feeds[n]) for n in ("input_ids", "attention_mask"))
    logits = model(input_ids=ids, attention_mask=mask).logits
    if labels is None:
        return logits.detach().numpy(), {}
    flat = logits.reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, torch.from_numpy(labels).reshape(-1))
    loss.backward()
    gradients = {
        n.replace(".default", ""): p.grad.numpy()
        for n, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    return logits.detach().numpy(), gradients


def worst_gradient(
    adapted: Adapted,
    feeds: dict[str, np.ndarray],
    labels: np.ndarray,
    gradients: dict[str, np.ndarray],
) -> float:
    """Return the largest difference of a factor's gradient, relative to the largest number."""
    loss = LossTerm(CrossEntropy(axis=-1, ignore_index=IGNORED), output="logits")
    artifacts = onnxtrain.build(adapted, loss=loss, optimizer="sgd")
    ours = onnxtrain.Trainer(artifacts).gradients(**feeds, labels=labels)
    worst = 0.0
    for a in adapted.adapters:
        stem = f"base_model.model.{a.module}."
        pairs = [(a.a, "lora_A.weight"), (a.b, "lora_B.weight")]
        if a.magnitude is not None:
            pairs.append((a.magnitude, "lora_magnitude_vector.weight"))
        for name, key in pairs:
            expected = gradients.pop(stem + key)
            got = ours[name] if name in ours else ours[f"{name}_grad"]
            got = got.T if got.ndim == 2 else got
            worst = max(worst, difference(got, expected))
    assert not gradients, f"only torch has {list(gradients)[:3]}"
    return worst


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference relative to the largest number."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def main(folder: Path, names: list[str]) -> None:
    """Check each file, or those named."""
    files = sorted((folder / "genai").glob("*/model.onnx"))
    for file in files:
        family, _, precision = file.parent.name.rpartition("-")
        if precision == "fp16" or (names and file.parent.name not in names):
            continue
        for options in ({}, {"rslora": True}, {"dora": True}):
            try:
                result: Any = check(file, folder / "checkpoints" / family, **options)
            except Exception as error:  # the line says so, and the reader judges
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(json.dumps({"file": file.parent.name, **options, **result}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
