"""Load the folder of a transformer and change its graph for training.

In this order:

    is_past, past_of             names of KV cache inputs and outputs
    inspect_model                the model, its kind, and facts from its configuration files
    add_pooling, add_classifier  sentence embeddings and class logits from an encoder
    add_token_classifier         class logits of each token
    without_cache                a decoder without its KV cache, as training needs it
"""

from __future__ import annotations

import dataclasses
import difflib
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
from onnxtrain.graph.io import CheckedModel, Source, load
from onnxtrain.graph.io.limits import OutsideError, quote, read_json, resolve_within

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
"""Inputs that are settings -> their value to compute all positions of a sequence."""


def is_past(name: str | None) -> bool:
    """Return whether an input is a KV cache.

    >>> is_past("past_key_values.0.key"), is_past("input_ids")
    (True, False)
    """
    return bool(_PAST.match(name or ""))


def is_present(name: str | None) -> bool:
    """Return whether an output is an updated KV cache.

    >>> is_present("present.0.value"), is_present("logits")
    (True, False)
    """
    return bool(_PRESENT.match(name or ""))


def past_of(present: str, past: Iterable[str]) -> str | None:
    """Return the cache input that an output is fed to for the next token.

    >>> past_of("present.0.key", ["past_key_values.0.key", "past_key_values.0.value"])
    'past_key_values.0.key'
    """
    parts = _parts(present)
    return next((name for name in past if _parts(name) == parts), None)


def _parts(name: str) -> tuple[str, ...]:
    """Return layer and kind of a cache name: ``("0", "key")``."""
    tokens = re.split(r"[._]", name)
    numbers = [t for t in tokens if t.isdigit()]
    kinds = [t for t in tokens if t in ("key", "value", "decoder", "encoder", "self", "cross")]
    kinds = kinds if kinds[:1] != ["key"] or "values" not in tokens else kinds[1:]
    return *numbers, *kinds


LINK_HINT = "hint: copy the file itself into the folder (`cp -L` follows links)"
_MAX_SIZE = 2**31 - 1

KINDS = (
    *("causal_lm", "classification", "embeddings", "regression", "token_classification"),
    "vision",
)
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
    """An ``.onnx`` file with its configuration files: task, vocabulary, limits, special tokens."""

    path: Path
    """The ``.onnx`` file."""
    model: CheckedModel = dataclasses.field(repr=False, compare=False)
    """The file, loaded and checked; the weights stay mapped."""
    kind: str
    """One of :data:`KINDS`."""
    reason: str
    """Where the kind comes from, for messages."""
    vocab_size: int | None
    max_positions: int | None
    """The longest sequence, if a configuration file has it."""
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    inputs: tuple[str, ...]
    head_size: int | None = None
    """The size of an attention head, if a configuration file has it."""

    @property
    def folder(self) -> Path:
        """The folder of the tokenizer and the configuration files."""
        parent = self.path.parent
        return parent.parent if parent.name == "onnx" and not _has_files(parent) else parent

    @property
    def has_cache(self) -> bool:
        """Whether the model has KV cache inputs."""
        return any(is_past(name) for name in self.inputs)


def inspect_model(model: str | os.PathLike[str], kind: str | None = None) -> ModelFolder:
    """Load a model and the configuration files beside it.

    Args:
        model: an ``.onnx`` file or its folder.
        kind: one of :data:`KINDS`; detected from the files if ``None``.

    Raises:
        LoadError: if no model is found.
        PrepareError: if the kind is unknown or cannot be detected.
    """
    path = _model_file(Path(model))
    beside = path.parent.parent if path.parent.name == "onnx" else path.parent
    settings = read_settings(path.parent / "genai_config.json")
    genai = settings.inner("model")
    config = read_settings(path.parent / "config.json") or read_settings(beside / "config.json")
    checked = CheckedModel(load(path), str(path))
    graph = checked.model.graph
    if kind is None:
        kind, reason = _detect_kind(graph, genai, config)
    else:
        reason = "kind="
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=len(KINDS), cutoff=0.0)
        raise PrepareError(f"unknown kind of model: {kind!r} (expected one of {', '.join(near)})")
    text = config.inner("text_config") or config
    lengths = [genai.size("context_length"), *map(text.size, _MAX_LENGTH_FIELDS)]
    return ModelFolder(
        path=path,
        model=checked,
        kind=kind,
        reason=reason,
        vocab_size=_vocab_size(graph, kind) or genai.size("vocab_size") or text.size("vocab_size"),
        max_positions=next((n for n in lengths if n is not None), None),
        eos_token_ids=_ids(genai.get("eos_token_id", text.get("eos_token_id"))),
        pad_token_id=next(iter(_ids(genai.get("pad_token_id", text.get("pad_token_id")))), None),
        inputs=tuple(x.name or "" for x in graph.inputs),
        head_size=genai.inner("decoder").size("head_size") or text.size("head_dim"),
    )


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise LoadError(
            f"{str(path)!r}: no such file or folder\nhint: pass an .onnx file or its folder"
        )
    settings = read_settings(path / "genai_config.json")
    named = settings.inner("model").inner("decoder").get("filename")
    if isinstance(named, str) and not _is_inside(path / named, path):
        raise LoadError(
            f"{str(settings.path)!r}: the model {quote(named)} is outside of its folder\n"
            "hint: if you trust it, pass the .onnx file itself"
        )
    for name in (*([named] if isinstance(named, str) else []), *_DEFAULT_FILES):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.onnx"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise LoadError(f"{str(path)!r}: found no .onnx file\nhint: pass the .onnx file")
    listing = ", ".join(f.name for f in files)
    raise LoadError(f"{str(path)!r}: found several .onnx files: {listing}; pass one of them")


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        resolve_within(path, files_root(folder))
    except OSError:
        return False
    return True


def _detect_kind(
    graph: ir.Graph, genai: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the kind of a model, and what it was detected from."""
    inputs = {x.name or "": x for x in graph.inputs}
    outputs = {y.name or "": y for y in graph.outputs}
    if INPUT_IDS not in inputs:
        if INPUTS_EMBEDS in inputs:
            raise PrepareError(
                f"the model has the input {INPUTS_EMBEDS!r}: embeddings instead of token ids\n"
                "hint: export the language model together with its embedding layer"
            )
        images = [n for n, x in inputs.items() if len(S.dims_of(x) or ()) == 4 and S.is_float(x)]
        if images:
            return "vision", f"the 4-D input {images[0]!r}"
        listing = ", ".join(inputs)
        raise PrepareError(
            f"cannot detect the kind of model from its inputs {listing}\n"
            f"hint: kind= (--kind): {', '.join(KINDS)}"
        )
    if genai or any(is_past(n) for n in inputs):
        return "causal_lm", "genai_config.json" if genai else "its KV cache inputs"
    listed = config.get("architectures")
    names = " ".join(n for n in listed if isinstance(n, str)) if isinstance(listed, list) else ""
    if "CausalLM" in names or "LMHead" in names:
        return "causal_lm", f"config.json ({names})"
    if "ForTokenClassification" in names:
        return "token_classification", f"config.json ({names})"
    rank = len(S.dims_of(outputs["logits"]) or ()) if "logits" in outputs else 0
    if rank == 2:
        return "classification", "its output logits, [batch, classes]"
    if rank == 3 and "logits" in outputs:
        size, words = (S.dims_of(outputs["logits"]) or (None,))[-1], _vocab_size(graph, "")
        if isinstance(size, int) and words is not None and 4 * size < words:
            return "token_classification", f"its output logits, [batch, sequence, {size}]"
        return "causal_lm", "its output logits, [batch, sequence, vocabulary]"
    return "embeddings", f"its outputs {', '.join(outputs)}"


def _vocab_size(graph: ir.Graph, kind: str) -> int | None:
    """Return the last dimension of the logits, or the rows of the token embedding."""
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


def files_root(folder: Path) -> Path:
    """Return the folder that links in a model folder may lead to: itself, or its download cache.

    Hugging Face's cache has links from ``models--org--name/snapshots/<revision>`` to files in
    ``models--org--name/blobs``.
    """
    for parent in (folder.absolute(), *folder.absolute().parents)[:3]:
        cache = parent.parent.parent
        if parent.parent.name == "snapshots" and (cache / "blobs").is_dir():
            return cache
    return folder


class Settings(dict[str, Any]):
    """The content of a configuration file; empty if the file does not exist."""

    def __init__(self, path: Path, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise LoadError(
                f"{str(path)!r}: {where or 'the content'} must be an object, got {quote(value)}"
            )
        super().__init__(value)
        self.path = path

    def inner(self, name: str) -> Settings:
        """Return the settings of a part, empty without one."""
        value = self.get(name)
        return Settings(self.path, {} if value is None else value, name)

    def size(self, name: str) -> int | None:
        """Return a positive integer, or ``None`` without one."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise LoadError(
                f"{str(self.path)!r}: {name} must be an integer from 1 to {_MAX_SIZE}, got "
                f"{quote(value)}"
            )
        return value


def read_settings(path: Path) -> Settings:
    """Return the content of a configuration file.

    Raises:
        LoadError: if it is not a JSON object, over a size limit, not a file, or a link that leads
            out of the folder.
    """
    if not os.path.lexists(path):
        return Settings(path, {})
    try:
        return Settings(path, read_json(path, within=files_root(path.parent)))
    except OutsideError as error:
        raise LoadError(f"{str(path)!r}: {error.strerror}\n{LINK_HINT}") from error
    except OSError as error:
        raise LoadError(f"{str(path)!r}: cannot be read: {error.strerror}") from error
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(f"{str(path)!r}: cannot be read: {error}") from error


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    # Configurations without a token have -1.
    ids = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    return tuple(v for v in ids if 0 <= v <= _MAX_SIZE)


def _has_files(folder: Path) -> bool:
    return (folder / "tokenizer.json").exists() or (folder / "genai_config.json").exists()


EMBEDDING = "sentence_embedding"
LOGITS = "logits"
_POOLING_MODES = ("mean", "first")
_EPSILON = 1e-9


def add_pooling(model: Source, *, how: str = "mean") -> ir.Model:
    """Return a copy of an encoder whose only output is ``sentence_embedding``, ``[batch, D]``.

    Args:
        model: an encoder with token embeddings, ``[batch, sequence, D]``; or with sentence
            embeddings, named ``sentence_embedding`` or the only 2-D output.
        how: ``"mean"`` of the tokens in the attention mask, or the ``"first"`` token.

    Raises:
        PrepareError: if the model has no embeddings.
    """
    if how not in _POOLING_MODES:
        listing = ", ".join(_POOLING_MODES)
        raise PrepareError(f"unknown pooling: {how!r} (expected one of {listing})")
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
        raise PrepareError(
            f"no output has token or sentence embeddings: {listing}\n"
            "hint: the output must have the shape [batch, sequence, D] or [batch, D]"
        )
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
    """Return a copy of an encoder with a classification head, ``logits [batch, classes]``.

    The head is a linear layer on the pooled embedding. Its weights ``classifier.weight`` and
    ``classifier.bias`` are initialized like ``torch.nn.Linear``.
    """
    work = add_pooling(model, how=how)
    graph = work.graph
    (embedding,) = graph.outputs
    width = (S.dims_of(embedding) or (None,))[-1]
    if not isinstance(width, int):
        raise PrepareError(f"unknown embedding size: {S.describe_value(embedding)}")
    op = OpBuilder(graph, "classifier/")
    weight, bias = _linear(op, width, classes, seed)
    scores = op.Gemm(op.cast(embedding, ir.DataType.FLOAT), weight, bias)
    scores.name = LOGITS
    graph.outputs[:] = [scores]
    return work


def add_token_classifier(model: Source, classes: int, *, seed: int = 0) -> ir.Model:
    """Return a copy of an encoder with class logits of each token, ``[batch, sequence, classes]``.

    The head is a linear layer with the weights of :func:`add_classifier`.
    """
    work = load(model, allow_domains=registered_domains())
    hidden = next(
        (y for y in work.graph.outputs if len(S.dims_of(y) or ()) == 3 and S.is_float(y)), None
    )
    width = None if hidden is None else (S.dims_of(hidden) or (None,))[-1]
    if hidden is None or not isinstance(width, int):
        listing = ", ".join(S.describe_value(y) for y in work.graph.outputs)
        raise PrepareError(
            f"no output has token embeddings: {listing}\n"
            "hint: the output must have the shape [batch, sequence, D] with a static D"
        )
    op = OpBuilder(work.graph, "classifier/")
    weight, bias = _linear(op, width, classes, seed)
    scores = op.Add(op.MatMul(op.cast(hidden, ir.DataType.FLOAT), weight), bias)
    scores.name = LOGITS
    work.graph.outputs[:] = [scores]
    return work


def _linear(op: OpBuilder, width: int, classes: int, seed: int) -> tuple[ir.Value, ir.Value]:
    rng = np.random.default_rng(seed)
    bound = 1.0 / math.sqrt(width)
    weight = _weight(op, "classifier.weight", rng.uniform(-bound, bound, (width, classes)))
    return weight, _weight(op, "classifier.bias", rng.uniform(-bound, bound, classes))


def _weight(op: OpBuilder, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array.astype(np.float32), name=op.names.fresh(name))
    value = ir.Value(
        name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    op.graph.register_initializer(value)
    return value


_PAST_INPUTS: Mapping[str, tuple[int, ...]] = {
    "com.microsoft::GroupQueryAttention": (3, 4),
    "com.microsoft::SparseAttention": (3, 4),
    "com.microsoft::MultiHeadAttention": (6, 7),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (5, 6),
    "com.microsoft::Attention": (4,),
    "::Attention": (4, 5),
}
"""Operators with optional KV cache inputs -> the indices of these inputs."""


def without_cache(model: Source) -> ir.Model:
    """Return a copy of a language model without its KV cache, ready for ``build``.

    Removes cache inputs (``past_key_values.0.key``) and outputs (``present.0.key``); the cache is
    empty. Settings such as ``use_cache_branch`` become constants that compute all positions. The
    attention mask gets the length of the sequence. A model without these inputs does not change.

    Raises:
        PrepareError: if the size of an empty cache is unknown.
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
        _remove_past(op, x, known[INPUT_IDS])
        graph.inputs.remove(x)
    _rename_sizes(graph, known)
    return work


def _remove_past(op: OpBuilder, past: ir.Value, ids: ir.Value) -> None:
    """Remove a cache from the nodes that read it, in place.

    Attention operators lose the optional input, a Concat of cache and new keys becomes the new
    keys, and other nodes read an empty cache.
    """
    for use in list(past.uses()):
        node, index = use.node, use.idx
        if index in _PAST_INPUTS.get(f"{node.domain}::{node.op_type}", ()):
            node.replace_input_with(index, None)
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
            node.replace_input_with(index, _empty_cache(op, past, ids))
        else:
            shape_only = node.op_type == "Shape" and not node.domain
            node.replace_input_with(index, _empty_cache(op, past, ids, shape_only=shape_only))


def _drop_present(node: ir.Node) -> None:
    """Remove unused cache outputs of an attention node: they require a cache input."""
    for y in node.outputs[1:3]:
        if not y.uses() and not y.is_graph_output():
            y.name = ""
    if not any(y.name for y in node.outputs[1:]):
        node.resize_outputs(1)


def _empty_cache(
    op: OpBuilder, past: ir.Value, ids: ir.Value, *, shape_only: bool = False
) -> ir.Value:
    """Return a cache of no tokens, ``[batch, heads, 0, head_size]``.

    With ``shape_only`` symbolic heads and head sizes become 1: nodes read the length only.
    """
    dims = S.dims_of(past) or ()
    symbolic = [i for i, d in enumerate(dims) if not isinstance(d, int) and i not in (0, 2)]
    if len(dims) < 3 or (symbolic and not shape_only):
        raise PrepareError(
            f"the cache {S.describe_value(past)} has symbolic sizes\n"
            "hint: export the model without a cache (use_cache=False)"
        )
    sizes = [d if isinstance(d, int) else int(i in symbolic) for i, d in enumerate(dims)]
    batch = op.size(ids, 0) if not isinstance(dims[0], int) else dims[0]
    return op.full([batch, *sizes[1:]], 0.0, past.dtype or ir.DataType.FLOAT)


def _rename_sizes(graph: ir.Graph, known: Mapping[str, ir.Value]) -> None:
    """Rename the symbolic length of mask and positions to that of the ids, in the whole graph.

    Exporters call it ``past_sequence_length + sequence_length``; without a past both are equal.
    """
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
