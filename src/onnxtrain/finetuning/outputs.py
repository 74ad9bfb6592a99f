"""What a finished fine-tuning leaves: adapters for others, and a model to serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.adapters import Adapted
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.atomic import content, write_files
from onnxtrain.graph.prepare import show_weights
from onnxtrain.text.folder import ModelFolder
from onnxtrain.training import Trainer

_BESIDE = (
    *("genai_config.json", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.txt"),
    *("added_tokens.json", "merges.txt", "vocab.json", "tokenizer.model"),
    "preprocessor_config.json",
)
"""Files that go with a model to where it is served."""


def write_outputs(
    trainer: Trainer,
    adapted: Adapted | None,
    folder: ModelFolder,
    output: Path,
    *,
    requantise: bool = False,
) -> dict[str, str]:
    """Write everything; return in words what lies where.

    A language model with adapters gives ``peft/``, ``adapter.onnx_adapter`` with ``base/`` and
    ``merged/``. Anything else gives ``merged/``: the model with its trained weights.
    """
    written: dict[str, str] = {}
    merged = output / "merged" / folder.path.name
    merged.parent.mkdir(parents=True, exist_ok=True)
    if adapted is not None and not adapted.foreign:
        adapted.export_peft(output / "peft", trainer, task_type=_TASKS.get(folder.kind))
        written["peft/"] = "the adapters, for PEFT on the torch original"
    if adapted is not None and folder.kind == "causal_lm":
        if not adapted.dora:
            adapted.export_ort_adapter(output / "adapter.onnx_adapter", trainer)
            base = output / "base" / folder.path.name
            base.parent.mkdir(parents=True, exist_ok=True)
            adapted.export_ort_base(base)
            copy_beside(folder, base.parent)
            written["adapter.onnx_adapter"] = "the same for onnxruntime and onnxruntime-genai"
            written["base/"] = "the model with inputs for it"
        how = "requantise" if requantise else "branch"
        report = adapted.export_merged(merged, trainer, quantised=how)
        written["merged/"] = f"a model to serve: {report}"
    elif folder.kind == "causal_lm":
        save(with_weights(folder, trainer), merged)
        written["merged/"] = "a model to serve, with the trained weights"
    else:
        trainer.export(merged)
        written["merged/"] = "a model to serve, with the trained weights"
    copy_beside(folder, merged.parent)
    return written


def with_weights(folder: ModelFolder, trainer: Trainer) -> ir.Model:
    """Return the model of the folder, cache and all, with the trained weights in their places."""
    model, _ = show_weights(load(folder.path))
    for name, array in trainer.parameters.items():
        place = model.graph.initializers[name]
        assert place.const_value is not None
        dtype = place.const_value.dtype
        place.const_value = ir.Tensor(array.astype(dtype.numpy()), dtype, name=name)
    return model


_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "embeddings": "FEATURE_EXTRACTION",
}


def copy_beside(folder: ModelFolder, target: Path) -> None:
    """Copy tokenizer and configuration to where a model was written."""
    for name in _BESIDE:
        source = folder.folder / name
        if source.is_file():
            shutil.copyfile(source, target / name)


def write_json(path: Path, value: Any) -> None:
    """Write a file of settings or results: whole, or the old one stays."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_files(repr(str(path)), {str(path.absolute()): content(text.encode())})


__all__ = ["copy_beside", "with_weights", "write_json", "write_outputs"]
