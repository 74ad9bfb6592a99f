"""A model and the files beside it: what kind of model it is, and what they say about it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import LoadError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import load
from onnxtrain.graph.io.regular_file import open_regular
from onnxtrain.text.names import EMBEDDED, IDS, is_past

KINDS = ("causal_lm", "classification", "embeddings", "vision")
_USUAL = ("model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx", "onnx/model.onnx")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """What is known of a model before anything is built."""

    path: Path
    """The ``.onnx`` file."""
    kind: str
    """One of :data:`KINDS`."""
    why: str
    """What the kind was told by."""
    vocabulary: int | None
    """The number of tokens that the model scores, or has vectors for."""
    positions: int | None
    """The longest sequence, if something tells it."""
    eos: tuple[int, ...]
    pad: int | None
    inputs: tuple[str, ...]
    head: int | None = None
    """The size of an attention head, if something tells it."""

    @property
    def folder(self) -> Path:
        """Where the tokenizer and the configuration lie."""
        parent = self.path.parent
        return parent.parent if parent.name == "onnx" and not _has_files(parent) else parent

    @property
    def has_cache(self) -> bool:
        """Whether the model takes keys and values of earlier tokens."""
        return any(is_past(name) for name in self.inputs)


def look_at(model: str | os.PathLike[str], kind: str | None = None) -> ModelFolder:
    """Return what the files of a model tell; only the graph is read, and no weights.

    Args:
        model: an ``.onnx`` file, or the folder of one.
        kind: what the user says it is; told by the files if ``None``.

    Raises:
        LoadError: there is no model.
        PrepareError: it is not clear what the model is.
    """
    path = _model_file(Path(model))
    beside = path.parent.parent if path.parent.name == "onnx" else path.parent
    genai = _json(path.parent / "genai_config.json").get("model", {})
    config = _json(path.parent / "config.json") or _json(beside / "config.json")
    graph = load(path).graph
    if kind is None:
        kind, why = _kind_of(graph, genai, config)
    else:
        why = "it was said so"
    if kind not in KINDS:
        raise PrepareError(f"no such kind of model: {kind!r}\nhint: one of {', '.join(KINDS)}")
    text = config.get("text_config", config)
    lengths = [genai.get("context_length"), *(text.get(n) for n in _LENGTHS)]
    return ModelFolder(
        path=path,
        kind=kind,
        why=why,
        vocabulary=_vocabulary(graph, kind) or genai.get("vocab_size") or text.get("vocab_size"),
        positions=next((n for n in lengths if isinstance(n, int)), None),
        eos=_ids(genai.get("eos_token_id", text.get("eos_token_id"))),
        pad=next(iter(_ids(genai.get("pad_token_id", text.get("pad_token_id")))), None),
        inputs=tuple(x.name or "" for x in graph.inputs),
        head=genai.get("decoder", {}).get("head_size", text.get("head_dim")),
    )


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise LoadError(f"{str(path)!r}: no such file or folder\nhint: give the .onnx file")
    named = _json(path / "genai_config.json").get("model", {}).get("decoder", {}).get("filename")
    for name in (*([named] if isinstance(named, str) else []), *_USUAL):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.onnx"))
    if len(files) == 1:
        return files[0]
    what = ", ".join(f.name for f in files) or "no .onnx file"
    raise LoadError(f"{str(path)!r}: which model is meant? there is {what}\nhint: name the file")


def _kind_of(graph: ir.Graph, genai: dict[str, Any], config: dict[str, Any]) -> tuple[str, str]:
    inputs = {x.name or "": x for x in graph.inputs}
    outputs = {y.name or "": y for y in graph.outputs}
    if IDS not in inputs:
        if EMBEDDED in inputs:
            raise PrepareError(
                f"the model takes {EMBEDDED!r}, vectors instead of tokens\n"
                "hint: export the language model whole, with its table of embeddings"
            )
        images = [n for n, x in inputs.items() if len(S.dims_of(x) or ()) == 4 and S.is_float(x)]
        if images:
            return "vision", f"its input {images[0]!r} has four axes"
        listing = ", ".join(inputs)
        raise PrepareError(
            f"what kind of model is this? it takes {listing}\n"
            f"hint: say it by kind= (--kind): {', '.join(KINDS)}"
        )
    if genai or any(is_past(n) for n in inputs):
        return "causal_lm", "genai_config.json" if genai else "its inputs for a cache"
    names = " ".join(config.get("architectures") or [])
    if "CausalLM" in names or "LMHead" in names:
        return "causal_lm", f"config.json ({names})"
    rank = len(S.dims_of(outputs["logits"]) or ()) if "logits" in outputs else 0
    if rank == 2:
        return "classification", "its output logits has a score per class"
    if rank == 3 and "logits" in outputs:
        return "causal_lm", "its output logits has scores per position"
    return "embeddings", f"its outputs are {', '.join(outputs)}"


def _vocabulary(graph: ir.Graph, kind: str) -> int | None:
    """Return how many tokens the logits score, or the table of embeddings has."""
    if kind == "causal_lm":
        for y in graph.outputs:
            size = (S.dims_of(y) or (None,))[-1]
            if y.name == "logits" and isinstance(size, int):
                return size
    ids = next((x for x in graph.inputs if x.name == IDS), None)
    for use in ids.uses() if ids is not None else ():
        table = use.node.inputs[0]
        if use.node.op_type == "Gather" and table is not None and table.is_initializer():
            size = (S.dims_of(table) or (None,))[0]
            return size if isinstance(size, int) else None
    return None


def _json(path: Path) -> dict[str, Any]:
    """Return what a file of settings says; nothing if there is none."""
    if not path.is_file():
        return {}
    try:
        with open_regular(path) as file:
            value = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise LoadError(f"{str(path)!r}: cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _has_files(folder: Path) -> bool:
    return (folder / "tokenizer.json").exists() or (folder / "genai_config.json").exists()


__all__ = ["KINDS", "ModelFolder", "look_at"]
