"""A model and the files beside it: what kind of model it is, and what they say about it.

The names that builders of language models give to inputs and outputs.

Encoders that give a vector per token, with a vector or scores per text behind them.

A language model as training sees it: whole sequences, no cache of earlier keys and values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.gradients import registered_domains
from onnxtrain.errors import LoadError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.limits import open_regular

INPUT_IDS = "input_ids"
INPUTS_EMBEDS = "inputs_embeds"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
TOKEN_TYPE_IDS = "token_type_ids"
LABELS = "labels"

_PAST = re.compile(r"past[_.]|past_key|cache\.")
_PRESENT = re.compile(r"present[_.]|present_key|past_key_values\.\d+\..*_out")

SETTING_INPUTS: dict[str, int | bool] = {
    "use_cache_branch": False,
    "num_logits_to_keep": 0,
    "logits_to_keep": 0,
}
"""Inputs that are settings, and the value under which a whole sequence is computed at once."""


def is_past(name: str | None) -> bool:
    """Return whether an input holds keys or values of earlier tokens.

    >>> is_past("past_key_values.0.key"), is_past("input_ids")
    (True, False)
    """
    return bool(_PAST.match(name or ""))


def is_present(name: str | None) -> bool:
    """Return whether an output holds keys or values for the tokens to come.

    >>> is_present("present.0.value"), is_present("logits")
    (True, False)
    """
    return bool(_PRESENT.match(name or ""))


def past_of(present: str, past: Iterable[str]) -> str | None:
    """Return the input that an output is fed to when generation goes on.

    >>> past_of("present.0.key", ["past_key_values.0.key", "past_key_values.0.value"])
    'past_key_values.0.key'
    """
    wanted = _parts(present)
    return next((name for name in past if _parts(name) == wanted), None)


def _parts(name: str) -> tuple[str, ...]:
    """Return the layer and what it is of: ``("0", "key")``."""
    words = re.split(r"[._]", name)
    numbers = [w for w in words if w.isdigit()]
    kinds = [w for w in words if w in ("key", "value", "decoder", "encoder", "self", "cross")]
    kinds = kinds if kinds[:1] != ["key"] or "values" not in words else kinds[1:]
    return *numbers, *kinds


KINDS = ("causal_lm", "classification", "embeddings", "vision")
_DEFAULT_FILES = (
    "model.onnx",
    "decoder_model_merged.onnx",
    "decoder_model.onnx",
    "onnx/model.onnx",
)
_MAX_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


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


def inspect_model(model: str | os.PathLike[str], kind: str | None = None) -> ModelFolder:
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
    lengths = [genai.get("context_length"), *(text.get(n) for n in _MAX_LENGTH_FIELDS)]
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
    for name in (*([named] if isinstance(named, str) else []), *_DEFAULT_FILES):
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
    if INPUT_IDS not in inputs:
        if INPUTS_EMBEDS in inputs:
            raise PrepareError(
                f"the model takes {INPUTS_EMBEDS!r}, vectors instead of tokens\n"
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
    ids = next((x for x in graph.inputs if x.name == INPUT_IDS), None)
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


EMBEDDING = "sentence_embedding"
LOGITS = "logits"
_POOLING_MODES = ("mean", "first")
_EPSILON = 1e-9


def add_pooling(model: Source, *, how: str = "mean") -> ir.Model:
    """Return a copy of an encoder whose only output is ``sentence_embedding``, ``[batch, D]``.

    Args:
        model: gives a vector per token, ``[batch, sequence, D]``, or a vector per text already,
            called ``sentence_embedding`` or the only output of two axes.
        how: ``"mean"`` of the tokens that the mask counts, or the ``"first"`` token.

    Raises:
        PrepareError: no output of the model has such vectors.
    """
    if how not in _POOLING_MODES:
        raise PrepareError(f"no such pooling: {how!r}\nhint: one of {', '.join(_POOLING_MODES)}")
    work = load(model, allow_domains=registered_domains())
    graph = work.graph
    flat = [y for y in graph.outputs if len(S.dims_of(y) or ()) == 2 and S.is_float(y)]
    known = next((y for y in flat if y.name == EMBEDDING), None)
    hidden = next(
        (y for y in graph.outputs if len(S.dims_of(y) or ()) == 3 and S.is_float(y)), None
    )
    if known is None and hidden is None and len(flat) == 1:
        known = flat[0]
    if known is None and hidden is None:
        listing = ", ".join(S.describe_value(y) for y in graph.outputs)
        raise PrepareError(f"no output has vectors of tokens or texts: {listing}")
    if known is None:
        assert hidden is not None
        known = _pool(OpBuilder(graph, "pool/"), hidden, how)
        known.name = EMBEDDING
    graph.outputs[:] = [known]
    return work


def _pool(op: OpBuilder, hidden: ir.Value, how: str) -> ir.Value:
    if how == "first":
        return op.Squeeze(op.Slice(hidden, [0], [1], [1]), [1])
    mask = next((x for x in op.graph.inputs if x.name == ATTENTION_MASK), None)
    if mask is None:
        return op.ReduceMean(hidden, [1], keepdims=0)
    counts = op.Unsqueeze(op.cast(mask, hidden.dtype), [2])
    total = op.ReduceSum(op.Mul(hidden, counts), [1], keepdims=0)
    return op.Div(total, op.Add(op.ReduceSum(counts, [1], keepdims=0), _EPSILON))


def add_classifier(model: Source, classes: int, *, how: str = "mean", seed: int = 0) -> ir.Model:
    """Return a copy of an encoder with a new layer that scores texts, ``logits [batch, classes]``.

    The layer's weights are ``classifier.weight`` and ``classifier.bias``, drawn as torch does.
    """
    work = add_pooling(model, how=how)
    graph = work.graph
    (embedding,) = graph.outputs
    width = (S.dims_of(embedding) or (None,))[-1]
    if not isinstance(width, int):
        raise PrepareError(f"the size of {S.describe_value(embedding)} is not known")
    rng = np.random.default_rng(seed)
    bound = 1.0 / math.sqrt(width)
    op = OpBuilder(graph, "classifier/")
    weight = _weight(op, "classifier.weight", rng.uniform(-bound, bound, (width, classes)))
    bias = _weight(op, "classifier.bias", rng.uniform(-bound, bound, classes))
    scores = op.Gemm(op.cast(embedding, ir.DataType.FLOAT), weight, bias)
    scores.name = LOGITS
    graph.outputs[:] = [scores]
    return work


def _weight(op: OpBuilder, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array.astype(np.float32), name=op.names.fresh(name))
    value = ir.Value(
        name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    op.graph.register_initializer(value)
    return value


_TAKES_PAST: Mapping[str, tuple[int, ...]] = {
    "com.microsoft::GroupQueryAttention": (3, 4),
    "com.microsoft::SparseAttention": (3, 4),
    "com.microsoft::MultiHeadAttention": (6, 7),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (5, 6),
    "com.microsoft::Attention": (4,),
    "::Attention": (4, 5),
}
"""Operators that may be given keys and values of earlier tokens, and where."""


def without_cache(model: Source) -> ir.Model:
    """Return a copy of a language model that computes whole sequences, ready for ``build``.

    Inputs for a cache (``past_key_values.0.key``) are gone and taken as empty, and so are its
    outputs (``present.0.key``); settings such as ``use_cache_branch`` have the value that computes
    all positions. The mask has the length of the sequence. A model without any of these comes back
    as it was.

    Raises:
        PrepareError: a cache is used in a way that has no empty form.
    """
    work = load(model, allow_domains=registered_domains())
    graph = work.graph
    known = {x.name or "": x for x in graph.inputs}
    past = [x for name, x in known.items() if is_past(name)]
    settings = {name: x for name, x in known.items() if name in SETTING_INPUTS}
    if INPUT_IDS not in known or not (
        past or settings or any(is_present(y.name) for y in graph.outputs)
    ):
        return work
    graph.outputs[:] = [y for y in graph.outputs if not is_present(y.name)]
    first = next(iter(graph))
    op = OpBuilder(graph, "whole/", before=first)
    for name, x in settings.items():
        value = np.full([1] * len(S.dims_of(x) or ()), SETTING_INPUTS[name])
        x.replace_all_uses_with(op.const(value, x.dtype))
        graph.inputs.remove(x)
    for x in past:
        _remove(op, x, known[INPUT_IDS])
        graph.inputs.remove(x)
    _rename_sizes(graph, known)
    return work


def _remove(op: OpBuilder, past: ir.Value, ids: ir.Value) -> None:
    """Take a cache away from all that reads it."""
    for use in list(past.uses()):
        node, place = use.node, use.idx
        if place in _TAKES_PAST.get(f"{node.domain}::{node.op_type}", ()):
            node.replace_input_with(place, None)
            node.attributes.pop("sliding_window_cache", None)
            _drop_present(node)
        elif node.op_type == "Concat" and not node.domain:
            rest = [x for x in node.inputs if x is not past]
            if len(rest) == 1 and rest[0] is not None:
                joined = node.outputs[0]
                rest[0].type = rest[0].type or past.type
                replace_value(joined, rest[0], [(u.node, u.idx) for u in joined.uses()])
                assert node.graph is not None
                node.graph.remove(node, safe=True)
                continue
            node.replace_input_with(place, _empty(op, past, ids))
        else:
            asked = node.op_type == "Shape" and not node.domain
            node.replace_input_with(place, _empty(op, past, ids, shape_only=asked))


def _drop_present(node: ir.Node) -> None:
    """Leave out outputs of an attention that nobody reads: without a past there may be none."""
    for y in node.outputs[1:3]:
        if not y.uses() and not y.is_graph_output():
            y.name = ""
    if not any(y.name for y in node.outputs[1:]):
        node.resize_outputs(1)


def _empty(op: OpBuilder, past: ir.Value, ids: ir.Value, *, shape_only: bool = False) -> ir.Value:
    """Return a cache of no tokens; where only its shape is read, that is the number of tokens."""
    dims = S.dims_of(past) or ()
    open_sizes = [i for i, d in enumerate(dims) if not isinstance(d, int) and i not in (0, 2)]
    if len(dims) < 3 or (open_sizes and not shape_only):
        raise PrepareError(
            f"the cache {S.describe_value(past)} has no size that could be read from the file\n"
            "hint: export the model without a cache (use_cache=False)"
        )
    sizes = [d if isinstance(d, int) else int(i in open_sizes) for i, d in enumerate(dims)]
    batch = op.size(ids, 0) if not isinstance(dims[0], int) else dims[0]
    return op.full([batch, *sizes[1:]], 0.0, past.dtype or ir.DataType.FLOAT)


def _rename_sizes(graph: ir.Graph, known: Mapping[str, ir.Value]) -> None:
    """Give mask and positions the length of the ids, and that name wherever it was another."""
    length = (S.dims_of(known[INPUT_IDS]) or (None, None))[-1]
    other: set[str] = set()
    for name in (ATTENTION_MASK, POSITION_IDS):
        size = (S.dims_of(known[name]) or (None,))[-1] if name in known else None
        if isinstance(size, str) and isinstance(length, str) and size != length:
            other.add(size)
    if not other:
        return
    values = [*graph.inputs, *(y for node in graph.all_nodes() for y in node.outputs)]
    for value in values:
        dims = S.dims_of(value) if value.shape is not None else None
        if dims is not None and other.intersection(d for d in dims if isinstance(d, str)):
            S.set_dims(value, [length if d in other else d for d in dims])
