"""Predict the memory of a training run before it starts, and find options that fit a budget.

:func:`plan` builds the training graph and predicts its peak on the CPU (:class:`TrainingMemory`).
If there is a budget, :func:`alternatives` builds the model with other options and predicts those.
The last part of the file parses and prints amounts such as ``2GB`` and ``4x512`` tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.adapters import lora
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.memory_usage import Sizes
from onnxtrain.graph.shapes.dims import dim
from onnxtrain.losses import LossLike, LossTerm
from onnxtrain.manifest import ModelSpec
from onnxtrain.optim import Optimizer
from onnxtrain.planning.step_memory import ExecutedGraph, StepMemory
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.runtime.session import executed_graph
from onnxtrain.text import without_cache
from onnxtrain.training.engine import LAYOUTS, choose_layout, require_spec

_MANIFEST = "manifest.json"
_TOKEN_INPUT = "input_ids"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted memory of training on the CPU.

    Attributes:
        parts: bytes by purpose.
        sizes: values of symbolic dimensions.
        at: the node at which activations peak.
        memory: the budget in bytes, if there is one.
        ways: alternatives that need less memory.
        unknown: number of values of unknown size, which count as 0 bytes.
    """

    parts: Mapping[str, int]
    sizes: Mapping[str, int]
    at: str
    memory: int | None
    ways: tuple[Alternative, ...]
    unknown: int

    @property
    def peak(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(self.parts.values())

    @property
    def peak_here(self) -> int:
        """The peak in this process, which holds more than the libraries, in bytes."""
        return self.peak - self.parts[_LIBRARIES] + process_memory()

    @property
    def fits(self) -> bool:
        """Whether the run fits the budget without an alternative."""
        return self.memory is None or self.peak <= self.memory

    def check(self) -> None:
        """Raise if the run does not fit the budget.

        Raises:
            OnnxTrainError: with the alternatives that fit, or the least memory that is needed.
        """
        if self.fits or self.memory is None:
            return
        message = (
            f"training takes about {format_bytes(self.peak)}, more than {format_bytes(self.memory)}"
        )
        fitting = [w for w in self.ways if w.peak <= self.memory]
        if fitting:
            hint = " or ".join(f"{w.name} ({format_bytes(w.peak)})" for w in fitting)
        else:
            least = min(self.ways, key=lambda w: w.peak, default=None)
            hint = f"at least {format_bytes(self.peak if least is None else least.peak)} are needed"
            hint += "" if least is None else f", with {least.name}"
        raise OnnxTrainError(f"{message}\nhint: {hint}")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
        return {**dataclasses.asdict(self), "peak": self.peak, "fits": self.fits}

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} = {v}" for n, v in self.sizes.items())
        lines = [f"about {format_bytes(self.peak)} at the peak{f' at {sizes}' if sizes else ''}"]
        lines += [f"  {format_bytes(b):>8}  {name}" for name, b in self.parts.items() if b]
        lines.append(f"activations peak at {self.at}")
        if self.unknown:
            lines.append(f"{self.unknown} value(s) of unknown size count as 0 bytes")
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} {format_bytes(self.memory)}")
        for way in self.ways:
            mark = "" if self.memory is None or way.peak > self.memory else " fits"
            lines.append(f"  {format_bytes(way.peak):>8}{mark}  {way.name}: {way.note}")
        return "\n".join(lines)


def plan(
    model: Source | Artifacts,
    *,
    loss: LossLike | None = None,
    optimizer: str | Optimizer = "adamw",
    memory: str | int | None = None,
    tokens: str | None = None,
    batch: int | None = None,
    sizes: Mapping[str, int] | None = None,
    recompute: str | Sequence[str] = (),
    **options: Any,
) -> Plan:
    """Predict the peak memory of training on the CPU, without training.

    ``plan`` builds the training graph and asks onnxruntime for the graph that it would execute. It
    then simulates the memory arena of onnxruntime over the lifetimes of all results, in execution
    order. Batches that the caller holds besides the current one are not included.

    Args:
        model: anything :func:`onnxtrain.build` accepts, artifacts, or their directory.
        loss: as for ``build``; by default ``"causal_lm"`` for language models and ``"mse"`` of the
            first output for others, which needs as much memory as other losses.
        optimizer: as for ``build``.
        memory: a budget such as ``"2GB"``; then ``ways`` lists alternatives that need less.
        tokens: number and length of sequences, ``"4x512"``.
        batch: the batch size.
        sizes: values of symbolic dimensions by name; others are 1.
        recompute: as for ``build``.
        options: other options of ``build``.
    """
    budget = None if memory is None else read_memory(memory)
    source = _artifacts(model)
    if source is None:
        work = without_cache(model)  # pyright: ignore[reportArgumentType]
        build_options = {
            "loss": _default_loss(work) if loss is None else loss,
            "optimizer": optimizer,
            "recompute": recompute,
            "check": False,
            **options,
        }

        def rebuild(**changes: Any) -> Artifacts:
            return build(work, **(build_options | changes))

        def adapt() -> Artifacts:
            return build(lora(work, targets="all-linear"), **build_options)

        run = TrainingMemory(rebuild())
        trains_all = not isinstance(model, Artifacts) and not hasattr(model, "adapters")
        others = rebuild, adapt if trains_all else None
    else:
        run, others = TrainingMemory(source), (None, None)
    symbols = _resolve_symbols(run, tokens, batch, sizes or {})
    batch_name = _batch_symbol(run)
    step, parts = run.step(symbols), run.parts(symbols)
    ways = () if budget is None else alternatives(run, symbols, batch_name, budget, *others)
    smaller = tuple(w for w in ways if w.peak < sum(parts.values()))
    return Plan(parts, symbols, step.at, budget, smaller, len(step.unknown))


def _artifacts(model: Source | Artifacts) -> Artifacts | None:
    if isinstance(model, Artifacts):
        return model
    if isinstance(model, str | os.PathLike) and (Path(os.fsdecode(model)) / _MANIFEST).exists():
        return Artifacts.load(os.fsdecode(model))
    return None


def _default_loss(model: ir.Model) -> LossLike:
    """Return a loss whose memory is representative of the losses for this kind of model."""
    model = load(model)
    outputs = [y for y in model.graph.outputs if S.is_float(y)]
    if not outputs:
        raise PrepareError("the model has no float output to train\nhint: pass loss=")
    first = outputs[0]
    if any(x.name == _TOKEN_INPUT for x in model.graph.inputs) and len(S.dims_of(first) or ()) == 3:
        return "causal_lm"
    return [LossTerm("mse", output=first.name)]


def _resolve_symbols(
    run: TrainingMemory, tokens: str | None, batch: int | None, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return a value for each symbolic dimension of the inputs."""
    inputs = run.spec.inputs_of("input", "target")
    names = dict.fromkeys(d for t in inputs for d in t.shape if isinstance(d, str))
    symbols = {n: 1 for n in names if n.isidentifier()}
    unknown = sorted(set(sizes) - set(symbols))
    if unknown:
        raise PrepareError(
            f"unknown dimension: {', '.join(unknown)}\n"
            f"hint: the model has {', '.join(symbols) or 'only fixed dimensions'}"
        )
    if tokens is not None:
        rows = next((t.shape for t in inputs if len(t.shape) == 2), ())
        count, length = read_tokens(tokens)
        resolved = {d: n for d, n in zip(rows, (count, length), strict=False) if isinstance(d, str)}
        if not resolved:
            raise PrepareError(
                f"tokens={tokens}: no input has dynamic dimensions [batch, sequence]"
            )
        symbols |= resolved
    name = _batch_symbol(run)
    if batch is not None:
        if name is None:
            raise PrepareError("batch=: the batch size of the model is fixed\nhint: omit batch=")
        symbols[name] = batch
    return {**symbols, **sizes}


def _batch_symbol(run: TrainingMemory) -> str | None:
    inputs = run.spec.inputs_of("input", "target")
    return next((t.shape[0] for t in inputs if t.shape and isinstance(t.shape[0], str)), None)


Rebuild = Callable[..., Artifacts]


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Options that need less memory for the same model.

    Attributes:
        name: the options, as a user would write them.
        peak: predicted bytes.
        note: the drawback.
    """

    name: str
    peak: int
    note: str = ""


def alternatives(
    run: TrainingMemory,
    symbols: Mapping[str, int],
    batch: str | None,
    budget: int | None,
    rebuild: Rebuild | None,
    adapt: Rebuild | None,
) -> Iterator[Alternative]:
    """Yield alternatives that may need less memory, the least invasive first.

    Args:
        run: the run with the options of the user.
        symbols: values of symbolic dimensions.
        batch: the symbolic batch dimension, if there is one.
        budget: available bytes; without a budget, the batch is halved once.
        rebuild: builds the artifacts with other options, if there is a model to build from.
        adapt: builds the artifacts with LoRA adapters.
    """
    yield from _smaller_batch(run, symbols, batch, budget, "")
    if rebuild is None:
        return
    recomputing = _try_build(lambda: rebuild(recompute="auto"))
    if recomputing is not None:
        yield Alternative(
            'recompute="auto"',
            _peak_bytes(recomputing, symbols),
            "one more forward pass per step",
        )
    sgd = _try_build(lambda: rebuild(optimizer="sgd"))
    if sgd is not None and run.artifacts.state:
        yield Alternative(
            'optimizer="sgd"', _peak_bytes(sgd, symbols), "no optimizer state; may converge slower"
        )
    if recomputing is not None:
        yield from _smaller_batch(recomputing, symbols, batch, budget, 'recompute="auto", ')
    if adapt is not None and (adapters := _try_build(adapt)) is not None:
        yield Alternative(
            "lora(rank=8)", _peak_bytes(adapters, symbols), "trains adapters, not the weights"
        )


def _smaller_batch(
    run: TrainingMemory,
    symbols: Mapping[str, int],
    batch: str | None,
    budget: int | None,
    prefix: str,
) -> Iterator[Alternative]:
    """Yield the run with the largest batch that fits, with gradient accumulation."""
    size = 1 if batch is None else symbols.get(batch, 1)
    if batch is None or size < 2:
        return
    fitting = size // 2
    while (
        budget is not None
        and fitting > 1
        and _peak_bytes(run, {**symbols, batch: fitting}) > budget
    ):
        fitting //= 2
    parts = run.parts({**symbols, batch: fitting})
    extra = parts["trained weights"] if run.layout == "vector" else 0
    name = f"{prefix}batch {fitting}, accumulate={-(-size // fitting)}"
    yield Alternative(name, sum(parts.values()) + extra, "the same update from smaller batches")


def _try_build(build_artifacts: Callable[[], Artifacts]) -> TrainingMemory | None:
    try:
        return TrainingMemory(build_artifacts())
    except OnnxTrainError:
        return None  # the model does not support these options


def _peak_bytes(run: TrainingMemory, symbols: Mapping[str, int]) -> int:
    return sum(run.parts(symbols).values())


# Measured with `python -m benchmarks.planned_memory`.
_INTERPRETER_BYTES = 120 << 20  # used where /proc does not exist
_LIBRARIES = "interpreter and libraries"
_SESSION_BYTES = 22 << 20  # code of kernels that is paged in, thread pools, sessions of the update
_BYTES_PER_NODE = 8 << 10  # memory of a session per node
_BYTES_PER_PACKED_WEIGHT = 0.5  # a weight of 4 bits in the layout of the kernels
_MATMUL_OPERATORS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm")


class TrainingMemory:
    """The predicted memory of a training run on the CPU.

    Args:
        artifacts: artifacts to train.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.layout, _ = choose_layout(artifacts, "cpu")
        self.spec = require_spec(artifacts, LAYOUTS[self.layout].batch_model)
        self._steps: dict[tuple[tuple[str, int], ...], StepMemory] = {}

    @functools.cached_property
    def graph(self) -> ExecutedGraph:
        """The graph of a step as onnxruntime executes it."""
        source = self.artifacts.source_of(self.spec)
        if isinstance(source, str):
            written = onnx.load(source, load_external_data=False)
        else:
            written = onnx.load_from_string(source)
        outputs = {t.name for t in self.spec.outputs}
        return ExecutedGraph(executed_graph(source), written, outputs)

    def step(self, symbols: Mapping[str, int]) -> StepMemory:
        """Return the memory of a step for given values of symbolic dimensions."""
        key = tuple(sorted(symbols.items()))
        if key not in self._steps:
            self._steps[key] = self.graph.memory(symbols)
        return self._steps[key]

    def parts(self, symbols: Mapping[str, int]) -> dict[str, int]:
        """Return bytes by purpose, for given values of symbolic dimensions."""
        step = self.step(symbols)
        frozen, packed = self._frozen()
        values, state = (
            sum(a.nbytes for a in part.values())
            for part in (self.artifacts.values, self.artifacts.state)
        )
        return {
            _LIBRARIES: interpreter_memory(),
            "sessions": _SESSION_BYTES + _BYTES_PER_NODE * len(self.graph.nodes),
            "frozen weights": frozen,
            "packed copies of frozen weights": packed,
            "trained weights": values * (2 if self.layout == "fused" else 1),
            "optimizer state": state * (2 if self.layout == "fused" else 1),
            "gradients": self._gradients(),
            "activations": step.live,
            "gaps and workspaces": max(step.arena - step.live, 0),
            "batch": _batch_bytes(self.spec, symbols),
        }

    def _gradients(self) -> int:
        trained = sum(
            math.prod(p.shape) * np.dtype(numpy_dtype(p.dtype)).itemsize
            for p in self.artifacts.manifest.parameters
        )
        return trained * {"vector": 1, "separate": 2}.get(self.layout, 0)

    def _frozen(self) -> tuple[int, int]:
        """Return the bytes of weights in the graph, and of their copies packed for kernels."""
        sizes = Sizes()
        weights = self.graph.weights
        packed = 0.0
        for node in self.graph.nodes:
            b = node.inputs[1] if len(node.inputs) > 1 else None
            if b is None or b.name not in weights:
                continue
            if node.op_type in _MATMUL_OPERATORS and b.dtype == ir.DataType.FLOAT:
                packed += sizes(b)
            elif node.op_type == "MatMulNBits":
                n, k = (node.attributes.get_int(a, 0) for a in ("N", "K"))
                packed += n * k * _BYTES_PER_PACKED_WEIGHT
        return sum(sizes(x) for x in weights.values()), int(packed)


def _batch_bytes(spec: ModelSpec, symbols: Mapping[str, int]) -> int:
    sizes = Sizes(symbols)
    total = 0
    for t in spec.inputs_of("input", "target"):
        count = sizes.elements([dim(d) for d in t.shape]) or 0
        total += count * np.dtype(numpy_dtype(t.dtype)).itemsize
    return total


@functools.cache
def interpreter_memory() -> int:
    """Return the memory of a process that has imported the libraries, measured where possible."""
    code = "import onnxtrain, onnxruntime; print(open('/proc/self/status').read())"
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        lines = [x for x in run.stdout.splitlines() if x.startswith("VmRSS")]
        return int(lines[0].split()[1]) << 10
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return _INTERPRETER_BYTES


def process_memory() -> int:
    """Return the memory of this process, or that of one with the libraries where unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return interpreter_memory()


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+)\s*[x\*]\s*(\d+)", re.IGNORECASE)


def read_memory(text: str | int) -> int:
    """Return the bytes of ``2GB``, ``512 MiB`` or a number of bytes.

    >>> read_memory("2GB"), read_memory("1.5 GiB"), read_memory(7)
    (2000000000, 1610612736, 7)
    """
    if isinstance(text, int):
        return text
    match = _MEMORY.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise PrepareError(f"not an amount of memory: {text!r}\nhint: write '2GB' or '512MiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def read_tokens(text: str) -> tuple[int, int]:
    """Return (sequences, length) of ``4x512``.

    >>> read_tokens("4x512")
    (4, 512)
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None or "0" in match.groups():
        raise PrepareError(
            f"not a number of tokens: {text!r}\nhint: write '4x512' for 4 sequences of length 512"
        )
    return int(match[1]), int(match[2])


def format_bytes(count: float) -> str:
    """Return an amount of memory as text.

    >>> format_bytes(2_345_000_000), format_bytes(12_000)
    ('2.35 GB', '12 kB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
