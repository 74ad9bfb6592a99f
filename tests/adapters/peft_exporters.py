"""Adapters of files by mobius and optimum against torch and PEFT; runs where peft is installed.

``python -m tests.adapters.peft_exporters FOLDER [producer/name ...]`` makes the torch original of
each file from its sizes, gives it the weights of the file, and prints one line of JSON: the
largest differences found.
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
from onnxtrain.adapters.layers import find_base_layers, find_target_modules
from tests.adapters.peft_check import (
    IGNORED,
    batch,
    difference,
    drawn,
    run,
    run_served,
    weight_of,
    worst_gradient,
)
from tests.wild.producers.sizes import MOBIUS, OPTIMUM, OPTIMUM_MODELS

FILES = (
    *("mobius/llama", "mobius/qwen2", "mobius/qwen3", "mobius/phi3", "mobius/gptj"),
    *("mobius/granite", "mobius/smollm3", "mobius/starcoder2", "mobius/gpt2", "mobius/olmo2"),
    "mobius/arcee",
    *("optimum/llama", "optimum/qwen2", "optimum/gpt2", "optimum/bert"),
)
_TORCH_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def check(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """Return the largest relative differences of logits and gradients from torch with PEFT."""
    producer, _, family = name.partition("/")
    exact = onnxtrain.load(folder / f"{name}.onnx")
    adapted = onnxtrain.lora(exact, 4, targets="all-linear", family=family, **options)
    adapted = adapted.with_parameters(drawn(adapted))
    feeds, labels = inputs(exact, family)
    valid = np.ones(labels.shape, bool) if labels.ndim == 1 else labels != IGNORED
    with tempfile.TemporaryDirectory() as directory:
        adapted.export_peft(directory)
        model = original(adapted, producer, family)
        torch_model = peft.PeftModel.from_pretrained(model, directory, is_trainable=True).eval()
        logits, gradients = run_torch(torch_model, feeds, labels)
        with torch_model.disable_adapter():
            plain, _ = run_torch(torch_model, feeds, labels)
        result = {
            "adapters": len(adapted.adapters),
            "without_adapter": difference(run(adapted.plain, feeds)[valid], plain[valid]),
            "logits": difference(run(adapted.model, feeds)[valid], logits[valid]),
            "gradients": worst_gradient(adapted, feeds, labels, gradients),
        }
        if not adapted.dora:
            served = run_served(adapted, feeds, Path(directory))
            result["onnx_adapter"] = difference(served[valid], logits[valid])
        merged = run(adapted.merge().model, feeds)
        result["merged"] = difference(merged[valid], logits[valid])
        again = onnxtrain.load_adapter(exact, directory, family=family)
        result["loaded"] = difference(run(again.model, feeds)[valid], logits[valid])
    return result


def inputs(model: ir.Model, family: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return inputs and labels for a decoder or an encoder."""
    feeds = batch(model)
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    known = {x.name for x in model.graph.inputs}
    if "token_type_ids" in known:
        feeds["token_type_ids"] = ids % 2
    feeds = {n: a for n, a in feeds.items() if n in known}
    if family == "bert":
        return feeds, np.array([0, 1])
    return feeds, np.where(mask == 1, ids, IGNORED)


def original(adapted: Adapted, producer: str, family: str) -> Any:
    """Return the torch model with the very weights of the file."""
    model = transformers_model(producer, family)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    arrays: dict[str, np.ndarray] = {}
    for target in find_target_modules(find_base_layers(adapted.plain.graph), family):
        assert target.module in modules, f"torch has no {target.module}"
        array = weight_of(target)
        turned = isinstance(modules[target.module], transformers.pytorch_utils.Conv1D)
        arrays[f"{target.module}.weight"] = array.T if turned else array
    for name, x in adapted.plain.graph.initializers.items():
        tensor = x.const_value
        if name in parameters and name not in arrays and tensor is not None:
            arrays[name] = tensor.numpy()
    arrays |= packed_biases(adapted, parameters, family)
    with torch.no_grad():
        for name, array in arrays.items():
            assert parameters[name].shape == array.shape, name
            parameters[name].copy_(torch.from_numpy(np.array(array)))
    return model


def packed_biases(
    adapted: Adapted, parameters: dict[str, Any], family: str
) -> dict[str, np.ndarray]:
    """Return biases and norms that files keep by other names than torch, or in parts."""
    known = adapted.plain.graph.initializers
    arrays: dict[str, np.ndarray] = {}
    for name in parameters:
        for parts in OTHER_NAMES.get(family, {}).items():
            end, others = parts
            if name not in known and name.endswith(end):
                stem = name.removesuffix(end)
                tensors = [known[stem + o].const_value for o in others if stem + o in known]
                if len(tensors) == len(others):
                    arrays[name] = np.concatenate([t.numpy() for t in tensors if t is not None])
    return arrays


_GPT2_ATTENTION = ("attn.q_proj.bias", "attn.k_proj.bias", "attn.v_proj.bias")
OTHER_NAMES = {
    "gpt2": {
        "attn.c_attn.bias": _GPT2_ATTENTION,
        "attn.c_proj.bias": ("attn.o_proj.bias",),
        "mlp.c_fc.bias": ("mlp.up_proj.bias",),
        "mlp.c_proj.bias": ("mlp.down_proj.bias",),
    },
    "starcoder2": {
        "mlp.c_fc.bias": ("mlp.up_proj.bias",),
        "mlp.c_proj.bias": ("mlp.down_proj.bias",),
    },
    "gptj": {
        "mlp.fc_in.bias": ("mlp.up_proj.bias",),
        "mlp.fc_out.bias": ("mlp.down_proj.bias",),
    },
}
"""Of mobius: the end of a torch name -> the ends of names in files, side by side."""


def transformers_model(producer: str, family: str) -> Any:
    """Return a torch model of the sizes that the producer's files have."""
    settings = transformers.CONFIG_MAPPING[family]
    own = set(settings().to_dict())
    sizes = MOBIUS if producer == "mobius" else OPTIMUM
    config = settings(**{k: v for k, v in sizes.items() if k in own})
    config._attn_implementation = "eager"
    config.tie_word_embeddings = False  # files have the last layer's weights by themselves
    if producer == "optimum":
        return getattr(transformers, OPTIMUM_MODELS[family][1])(config).eval()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def run_torch(
    model: Any, feeds: dict[str, np.ndarray], labels: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return logits, and gradients of all factors by PEFT's names without the adapter's."""
    model.zero_grad()
    logits = model(**{n: torch.from_numpy(feeds[n]) for n in _TORCH_INPUTS if n in feeds}).logits
    flat = logits.reshape(-1, logits.shape[-1])
    if any(p.requires_grad for p in model.parameters()) and flat.requires_grad:
        torch.nn.functional.cross_entropy(flat, torch.from_numpy(labels).reshape(-1)).backward()
    gradients = {
        n.replace(".default", ""): p.grad.numpy()
        for n, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    return logits.detach().numpy(), gradients


def main(folder: Path, names: list[str]) -> None:
    """Check each file, or those named."""
    ort.set_default_logger_severity(3)
    for name in names or FILES:
        try:
            result = check(folder, name)
        except Exception as error:  # the line says so, and the reader judges
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"file": name, **result}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
