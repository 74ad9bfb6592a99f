"""Run models and oracles: onnx's reference in float64, stock onnxruntime, torch in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator

from tests.cases.base import OpCase

Arrays = Sequence[np.ndarray]
Feeds = Mapping[str, np.ndarray]

torch.set_num_threads(1)

NUMPY = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.DOUBLE: np.float64,
    onnx.TensorProto.FLOAT16: np.float16,
}


def is_float(value: onnx.ValueInfoProto) -> bool:
    """Whether a graph input or output is a float tensor."""
    return value.type.tensor_type.elem_type in NUMPY


def coerce(proto: onnx.ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """Feeds by position, in the float types the model's inputs have."""
    named = {}
    for value, array in zip(proto.graph.input, feeds, strict=True):
        dtype = NUMPY.get(value.type.tensor_type.elem_type, array.dtype)
        named[value.name] = np.asarray(array, dtype)
    return named


def reference(proto: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
    """The model as a function of its inputs, on onnx's reference evaluator."""
    evaluator = ReferenceEvaluator(proto)

    def run(feeds: Arrays) -> list[np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [np.asarray(y) for y in evaluator.run(None, coerce(proto, feeds))]

    return run


def stock(proto: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
    """The model as a function of its inputs, on stock onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda feeds: [np.asarray(y) for y in session.run(None, coerce(proto, feeds))]


class Oracle:
    """The case's torch function in float64, with its gradients."""

    def __init__(self, case: OpCase) -> None:
        self.case = case

    def _call(self, feeds: Arrays, grad: bool) -> tuple[list[Any], list[torch.Tensor]]:
        given = iter(feeds)
        arguments, leaves = [], []
        for draw, constant in zip(self.case.inputs, self.case.values(), strict=True):
            if draw is None or constant is None:
                arguments.append(None)
            elif draw.kind == "const":
                is_real = constant.dtype.kind == "f"
                arguments.append(torch.tensor(constant) if is_real else constant.tolist())
            else:
                leaf = torch.tensor(next(given)).requires_grad_(grad and draw.kind == "wrt")
                arguments.append(leaf)
                leaves += [leaf] if draw.kind == "wrt" else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = self.case.torch(*arguments)  # type: ignore[misc]
        return (list(made) if isinstance(made, tuple | list) else [made]), leaves

    def forward(self, feeds: Arrays) -> list[np.ndarray | None]:
        """The outputs; None where the oracle gives none."""
        with torch.no_grad():
            return [None if y is None else y.numpy() for y in self._call(feeds, False)[0]]

    def backward(self, feeds: Arrays, cotangents: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Gradients of ``sum <cotangent, output>`` (by output index) for the inputs."""
        outputs, leaves = self._call(feeds, True)
        return _numbers(
            _gradient(outputs, {i: torch.tensor(c) for i, c in cotangents.items()}, leaves)
        )

    def second(
        self, feeds: Arrays, cotangents: Mapping[int, np.ndarray], weights: Arrays
    ) -> list[np.ndarray] | None:
        """Gradients of ``sum <weight, first gradient>`` for the inputs, then the cotangents.

        None where torch has no second derivative.
        """
        outputs, leaves = self._call(feeds, True)
        tangents = {i: torch.tensor(c, requires_grad=True) for i, c in cotangents.items()}
        try:
            first = _gradient(outputs, tangents, leaves, create_graph=True)
            chosen = [torch.tensor(w) for w in weights]
            total = dict(enumerate(first))
            return _numbers(
                _gradient(
                    list(total.values()), dict(enumerate(chosen)), [*leaves, *tangents.values()]
                )
            )
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented" in str(error) or "not differentiable" in str(error):
                return None
            raise


def _gradient(
    outputs: Sequence[Any],
    cotangents: Mapping[int, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> list[torch.Tensor]:
    terms = [(outputs[i] * c).sum() for i, c in cotangents.items() if outputs[i] is not None]
    total = torch.stack(terms).sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, create_graph=create_graph)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]


def _numbers(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return [t.detach().numpy(force=True) for t in tensors]  # force: torch has lazy zeros


def scale_of(arrays: Arrays) -> float:
    """The largest magnitude in several arrays."""
    return max((float(np.abs(a).max()) for a in arrays if a.size), default=0.0)


def assert_close(ours: Arrays, theirs: Arrays, names: Sequence[str], tol: float, what: str) -> None:
    """Every array agrees: same shape, error at most ``tol`` times its largest entry.

    An entry of almost nothing is measured against one hundredth of the largest of them all.
    """
    assert len(ours) == len(theirs) == len(names), what
    floor = max(1e-2 * scale_of(theirs), 1e-3)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert a.shape == b.shape, f"{what}: {name} has shape {a.shape}, not {b.shape}"
        finite = np.isfinite(b)
        assert np.array_equal(a[~finite], b[~finite], equal_nan=True), (
            f"{what}: {name} is {a}, not {b}"
        )
        error = scale_of([np.asarray(a[finite], np.float64) - b[finite]])
        limit = tol * max(scale_of([b[finite]]), floor)
        # a NaN fails the comparison, as it should
        assert error <= limit, (
            f"{what}: {name} is off by {error:.3g} (limit {limit:.3g})\n{a}\nnot\n{b}"
        )


@cache
def oracle_of(case: OpCase) -> Oracle | None:
    """The torch oracle of a case, if it has one."""
    return Oracle(case) if case.torch else None
