"""Engines for a case's model: float64 if one supports it, else float32 on onnxruntime."""

import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx.reference import ReferenceEvaluator

from tests.node_cases.cases import Case
from tests.node_cases.ort_values import from_ort, to_ort
from tests.node_cases.precision import double_array, single_array, to_double, to_single

Feeds = dict[str, np.ndarray]
Function = Callable[[Feeds], list[np.ndarray]]


onnxruntime.set_default_logger_severity(4)


def session(model: bytes, outputs: list[str] | None = None, *, optimize: bool = False) -> Function:
    """The model as a function on stock onnxruntime, on one thread.

    The optimizer is off for differences: what runs is the graph as written, in the precision as
    written. Gradients run with it, as users would.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    loaded = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(feeds: Feeds) -> list[np.ndarray]:
        values = {name: to_ort(array) for name, array in feeds.items()}
        return [from_ort(value) for value in loaded.run_with_ort_values(outputs, values)]

    return run


def _evaluator(model: onnx.ModelProto, names: list[str] | None) -> Function:
    evaluator = ReferenceEvaluator(to_double(model))

    def run(feeds: Feeds) -> list[np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide = {name: double_array(array) for name, array in feeds.items()}
            return [np.asarray(a) for a in evaluator.run(names, wide)]

    return run


def _wide(model: onnx.ModelProto, names: list[str] | None) -> Function:
    run = session(to_double(model).SerializeToString(), names)
    return lambda feeds: run({name: double_array(array) for name, array in feeds.items()})


def double_engines(model: onnx.ModelProto) -> list[Callable[[], Function]]:
    """Makers of functions that evaluate the model with its floats in double."""
    return [lambda: _wide(model, None), lambda: _evaluator(model, None)]


def _reference(case: Case) -> Function:
    return _evaluator(case.proto(), list(case.outputs))


def _reference_body(case: Case) -> Function:
    """The operator's function body: some operators themselves are float32 only on the reference."""
    model = case.proto()
    kinds = [("", node.op_type) for node in model.graph.node]
    inlined = onnx.inliner.inline_selected_functions(model, kinds, inline_schema_functions=True)
    if len(inlined.graph.node) == len(model.graph.node):
        raise NotImplementedError("no function body")
    return _evaluator(inlined, list(case.outputs))


def _wide_session(case: Case) -> Function:
    return _wide(case.proto(), list(case.outputs))


def _narrow_session(case: Case) -> Function:
    run = session(to_single(case.proto()).SerializeToString(), list(case.outputs))
    return lambda feeds: run({name: single_array(array) for name, array in feeds.items()})


# name, maker, steps, tolerance of the derivative; best first
ENGINES = (
    ("reference float64", _reference, 1e-5, 1e-5),
    ("reference float64, by function body", _reference_body, 1e-5, 1e-5),
    ("onnxruntime float64", _wide_session, 1e-5, 1e-5),
    ("onnxruntime float32", _narrow_session, 4e-3, 2e-2),
)


def agrees(case: Case, results: list[np.ndarray], slack: float = 1.0) -> bool:
    """Whether float outputs are those the case expects, within the precision they are stated in."""
    for name, result in zip(case.outputs, results, strict=True):
        wanted = case.expected[name]
        if wanted.shape != np.shape(result):
            return False
        rtol = slack * max(case.rtol, _unit(wanted.dtype))
        wide = wanted.astype(np.float64)
        finite = np.abs(wide[np.isfinite(wide)])
        atol = max(case.atol, rtol * float(finite.max()) * 1e-2 if finite.size else 0.0)
        got = np.asarray(result).astype(np.float64)
        if not np.allclose(got, wide, rtol, atol, equal_nan=True):
            return False
    return True


def _unit(dtype: np.dtype) -> float:
    return {"float16": 5e-3, "bfloat16": 4e-2}.get(dtype.name, 1e-3)
