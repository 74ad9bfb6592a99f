"""Compare two models on the same random inputs, and find the first tensor that differs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import MissingExtraError, OnnxTrainError, VerificationError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import captured
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify import RANDOM_OPS
from onnxtrain.importer.opset import NEWEST_OPSET
from onnxtrain.runtime import session

_SIZES = (2, 3, 1, 4, 8, 16)  # values to try for symbolic sizes, in this order
_COMPARED_SHAPES = 2  # number of sizes to compare
_ELEMENTS = 1 << 24  # limit for all inputs together
_INTEGER_LIMITS = (7, 2)  # random integers are below; they may be indices into small tables
_RTOL = 1e-3
_ATOL = 2e-5  # relative to the largest element
_SMALL = 0.05  # lower bound of that element, for tensors that are rounding errors only
_NOISE_FACTOR = 8  # times the change of the result when the last digit of the inputs changes
Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], list[np.ndarray]]


REFERENCE = "onnx's reference evaluator"


@dataclass(frozen=True)
class Comparison:
    """Where two models differ (``None`` if they do not), and the runtime that ran them."""

    difference: str | None
    runtime: str


def compare(
    original: onnx.ModelProto, lowered: onnx.ModelProto, sizes: Mapping[str, int]
) -> Comparison:
    """Compare two models on random inputs of several shapes.

    They run on onnxruntime, or on onnx's reference evaluator if onnxruntime is not installed or
    cannot run the original.

    Raises:
        VerificationError: if the original runs on none of the inputs, or the lowered model does not
            run.
    """
    first, why, runtime = runner(original, fall_back=True)
    if first is None:
        raise VerificationError(
            f"cannot run the original model: {why}\nhint: lower with verify=False and test it"
        )
    done, last = 0, ""
    second: Runner | None = None
    for feeds in random_feeds(original, sizes):
        try:
            expected = first(feeds)
        except OnnxTrainError as error:
            last = S.first_line(error)
            continue
        if second is None:
            second, why, other = runner(lowered)
            runtime = runtime if runtime == other else REFERENCE
            if second is None:
                raise VerificationError(f"the lowered model does not load: {why}")
        try:
            actual = second(feeds)
        except OnnxTrainError as error:
            raise VerificationError(
                f"the lowered model does not run: {S.first_line(error)}"
            ) from error
        names = [y.name for y in original.graph.output]
        random = _random_outputs(original)
        perturbed: list[np.ndarray] | None = None
        for i, (name, a, b) in enumerate(zip(names, expected, actual, strict=True)):
            why = difference(a, b, values=name not in random)
            if why:  # the values may be rounding errors only
                perturbed = perturbed or first(_perturb(feeds))
                why = difference(
                    a, b, values=name not in random, noise=_rounding_noise(a, perturbed[i])
                )
            if why:
                tensor = _first_difference(original, lowered, feeds) or f"{name!r} {why}"
                return Comparison(f"tensor {tensor} (inputs of shape {_shapes(feeds)})", runtime)
        done += 1
        if done == _COMPARED_SHAPES:
            break
    if not done:
        raise VerificationError(
            f"the original runs on none of the random inputs: {last}\n"
            "hint: lower with verify=False and compare on your own inputs"
        )
    return Comparison(None, runtime)


def evaluator(model: onnx.ModelProto) -> Runner:
    """Return a function that runs a model on onnx's reference evaluator."""
    from onnx.reference import ReferenceEvaluator  # slow to import, and not needed for training

    reference = ReferenceEvaluator(model)

    def run(feeds: Arrays) -> list[np.ndarray]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return [np.asarray(y) for y in reference.run(None, feeds)]
        except Exception as error:  # kernels raise any exception
            raise OnnxTrainError(S.first_line(error)) from error

    return run


def runner(model: onnx.ModelProto, *, fall_back: bool = False) -> tuple[Runner | None, str, str]:
    """Return a function that runs a model, or ``None`` and the reason; and its runtime."""
    try:
        ort_session = session.create(model.SerializeToString(), threads=1)
        return lambda feeds: session.run(ort_session, None, feeds), "", "onnxruntime"
    except MissingExtraError:
        pass
    except OnnxTrainError as error:
        why = S.first_line(error)
        if not fall_back and _opset_supported(model):
            return None, why, ""
    try:
        return evaluator(model), "", REFERENCE
    except Exception as error:  # the loader raises any exception
        return None, S.first_line(error), ""


def _opset_supported(model: onnx.ModelProto) -> bool:
    """Return whether onnxruntime supports the opset, so that its error is about the model."""
    return all(
        o.domain not in ("", "ai.onnx") or o.version <= NEWEST_OPSET for o in model.opset_import
    )


def random_feeds(model: onnx.ModelProto, sizes: Mapping[str, int]) -> Iterator[Arrays]:
    """Yield random inputs of several shapes."""
    weights = {x.name for x in model.graph.initializer}
    inputs = [
        (x.name, ir.serde.deserialize_value_info_proto(x, None))
        for x in model.graph.input
        if x.name not in weights
    ]
    fixed = {D.symbol(k): v for k, v in sizes.items()}
    symbols = sorted(
        {s for _, x in inputs for d in S.dims_of(x) or () for s in D.symbols(d)} - fixed.keys()
    )
    tried = _SIZES if symbols else _SIZES[:_COMPARED_SHAPES]
    for seed, (highest, size) in enumerate(itertools.product(_INTEGER_LIMITS, tried)):
        rng = np.random.default_rng(seed)
        values: dict[str, D.Dim] = {**fixed, **dict.fromkeys(symbols, size)}
        shapes = []
        for _, x in inputs:
            shape = [D.substitute(d, values) for d in S.dims_of(x) or ()]
            shapes.append(tuple(d if isinstance(d, int) else size for d in shape))
        _check_elements({name: s for (name, _), s in zip(inputs, shapes, strict=True)})
        yield {
            name: _random_array(rng, shape, x.dtype or ir.DataType.FLOAT, highest)
            for (name, x), shape in zip(inputs, shapes, strict=True)
        }


def _check_elements(shapes: Mapping[str, tuple[int, ...]]) -> None:
    elements = sum(math.prod(shape) for shape in shapes.values())
    if elements > _ELEMENTS or any(d < 0 for shape in shapes.values() for d in shape):
        listing = ", ".join(f"{name!r} {list(shape)}" for name, shape in shapes.items())
        raise VerificationError(
            f"the model is too large to verify: inputs {listing} have {elements} elements, the "
            f"limit is {_ELEMENTS}\nhint: lower with verify=False and compare on your own inputs"
        )


def _random_array(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: ir.DataType, highest: int
) -> np.ndarray:
    kind = dtype.numpy()
    if dtype == ir.DataType.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_floating_point():
        return rng.standard_normal(shape).astype(kind)
    return rng.integers(0, highest, shape).astype(kind)


def _perturb(feeds: Arrays) -> Arrays:
    """Return inputs that differ in the last digit."""
    rng = np.random.default_rng(0)
    return {
        n: x * (1 + rng.choice([-1, 1], x.shape) * np.finfo(x.dtype).eps).astype(x.dtype)
        if x.dtype.kind == "f"
        else x
        for n, x in feeds.items()
    }


def _rounding_noise(a: np.ndarray, perturbed: np.ndarray) -> float:
    """Return the largest change of a result; 0 if it is not floating point."""
    if a.dtype.kind != "f" or a.shape != perturbed.shape:
        return 0.0
    gap = np.abs(a.astype(np.float64) - perturbed.astype(np.float64))
    return float(np.max(gap[np.isfinite(gap)], initial=0.0))


def difference(a: np.ndarray, b: np.ndarray, *, values: bool = True, noise: float = 0.0) -> str:
    """Return how two arrays differ; an empty string if they do not."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return "" if type(a) is type(b) else "has another type"
    if a.shape != b.shape:
        return f"has shape {list(b.shape)}, should be {list(a.shape)}"
    if a.dtype != b.dtype:
        return f"is {b.dtype}, should be {a.dtype}"
    if not values or not a.size:
        return ""
    if a.dtype.kind not in "fV":
        wrong = int((a != b).sum())
        return f"differs in {wrong} of {a.size} elements" if wrong else ""
    wide, actual = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(wide)
    if not np.array_equal(np.isnan(wide), np.isnan(actual)):
        return "has NaN at other positions"
    if not np.array_equal(wide[~finite & ~np.isnan(wide)], actual[~finite & ~np.isnan(wide)]):
        return "has infinities at other positions"
    wide, actual = wide[finite], actual[finite]
    if not wide.size:
        return ""
    coarse = 64 if a.dtype.itemsize == 2 else 1
    bound = coarse * (_RTOL * np.abs(wide) + _ATOL * max(np.abs(wide).max(), _SMALL))
    bound += _NOISE_FACTOR * noise
    error = np.abs(wide - actual)
    if (error <= bound).all():
        return ""
    return f"is off by {error.max():.2e} (largest element {np.abs(wide).max():.2e})"


def _random_outputs(model: onnx.ModelProto) -> set[str]:
    """Return the outputs that depend on random numbers, of which only shapes are compared."""
    tainted: set[str] = set()
    work = ir.from_proto(model)
    for node in work.graph:
        kinds = {n.op_type for g in (node,) for n in _nodes_with_subgraphs(g)}
        inputs = {x.name for x in (*node.inputs, *captured(node)) if x is not None}
        if kinds & (RANDOM_OPS - {"Dropout"}) or _is_training_dropout(node) or inputs & tainted:
            tainted.update(y.name or "" for y in node.outputs)
    return tainted & {y.name for y in model.graph.output}


def _is_training_dropout(node: ir.Node) -> bool:
    return node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None


def _nodes_with_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def _first_difference(
    original: onnx.ModelProto, lowered: onnx.ModelProto, feeds: Arrays
) -> str | None:
    """Return the first tensor of the original that is in both models and differs."""
    here = [y for node in original.graph.node for y in node.output if y]
    there = {y for node in lowered.graph.node for y in node.output}
    shared = [name for name in here if name in there]
    try:
        runners = [runner(_with_outputs(m, shared))[0] for m in (original, lowered)]
        if None in runners:
            return None
        a, b = (run(feeds) for run in runners if run is not None)
        perturbed = runners[0](_perturb(feeds)) if runners[0] is not None else a
    except OnnxTrainError:
        return None
    for name, x, y, other in zip(shared, a, b, perturbed, strict=True):
        why = difference(x, y, noise=_rounding_noise(x, other))
        if why:
            return f"{name!r} {why}"
    return None


def _with_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {v.name: v for v in (*model.graph.output, *model.graph.value_info)}
    del copy.graph.output[:]
    copy.graph.output.extend(known.get(n, onnx.ValueInfoProto(name=n)) for n in names)
    return copy


def _shapes(feeds: Arrays) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in feeds.items())
