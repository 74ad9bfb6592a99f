"""One node of a fused operator, checked against onnxruntime's kernel and finite differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized

BATCH, LENGTH, PAST = 2, 5, 3
_NAMES = {LENGTH: "length", PAST: "past"}


def normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape) + 7 * len(shape))
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A node of a fused operator and its inputs; ``None`` for an omitted input."""

    op: str
    inputs: list[np.ndarray | None]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    """Names of outputs; ``int_*`` are int32, ``""`` is omitted."""
    constants: tuple[int, ...] = ()
    """Which inputs are initializers."""
    reference: Callable[..., Any] | None = None
    """Computes the outputs in NumPy, if onnxruntime has no CPU kernel."""
    domain: str = "com.microsoft"
    opset: int = 21
    rtol: float = 2e-5
    atol: float = 2e-5
    rows: Any = None
    """The part of each output to compare; all of it by default."""
    fixed: tuple[int, ...] = ()
    """Float inputs without a gradient."""
    symbolic: bool = True
    """Whether dimensions are symbolic."""
    precision: type = np.float64
    """The dtype to check gradients in: some kernels support only one."""

    def model(self, dtype: type = np.float32) -> onnx.ModelProto:
        values: list[ir.Value | None] = []
        initializers = []
        for i, array in enumerate(self.inputs):
            if array is None:
                values.append(None)
                continue
            array = _as(array, dtype)
            kind = ir.DataType.from_numpy(array.dtype)
            constant = i in self.constants
            dims = list(array.shape) if constant or not self.symbolic else _dims(array)
            value = ir.val(f"x{i}", kind, dims)
            if constant:
                value.const_value = ir.Tensor(array, name=f"x{i}")
                initializers.append(value)
            values.append(value)
        node = ir.Node(
            self.domain,
            self.op,
            values,
            ir.convenience.convert_attributes(dict(self.attributes)),
            num_outputs=len(self.outputs),
        )
        for value, name in zip(node.outputs, self.outputs, strict=True):
            kind = (
                ir.DataType.INT32
                if name.startswith("int_")
                else ir.DataType.from_numpy(np.dtype(dtype))
            )
            value.name, value.type = name, ir.TensorType(kind) if name else None
        graph = ir.Graph(
            [v for v in values if v is not None and v.const_value is None],
            [y for y in node.outputs if y.name],
            nodes=[node],
            initializers=initializers,
            opset_imports={"": self.opset, "com.microsoft": 1},
            name="fused",
        )
        return ir.to_proto(ir.Model(graph, ir_version=10))

    def feeds(self, dtype: type = np.float32) -> dict[str, np.ndarray]:
        return {
            f"x{i}": _as(a, dtype)
            for i, a in enumerate(self.inputs)
            if a is not None and i not in self.constants
        }

    def check_forward(self) -> None:
        model = self.model()
        got = _run(load_normalized_proto(model), self.feeds())
        if self.reference is not None:
            want = self.reference(*self.inputs, **self.attributes)
            want = list(want) if isinstance(want, tuple) else [want]
        else:
            want = _run(model, self.feeds())
        for a, b in zip(want, got, strict=True):
            if self.rows is not None and np.asarray(a).ndim == b.ndim == 3:
                a, b = a[self.rows], b[self.rows]
            np.testing.assert_allclose(b, a, rtol=self.rtol, atol=self.atol)

    def check_gradient(self, target: str = "portable") -> None:
        """Compare the directional derivative of each float input with finite differences."""
        dtype = self.precision
        model, feeds = self.model(dtype), self.feeds(dtype)
        wrt = [
            f"x{i}"
            for i, a in enumerate(self.inputs)
            if a is not None and a.dtype == np.float32 and i not in self.fixed
        ]
        output_names = [n for n in self.outputs if n and not n.startswith("int_")]
        plain = load_normalized_proto(model)
        arrays = {
            **feeds,
            **{t.name: ir.from_proto(t).numpy() for t in model.graph.initializer},
        }
        ys = _run(plain, feeds, output_names)
        rng = np.random.default_rng(3)
        seeds = {
            f"{n}_grad": rng.standard_normal(y.shape).astype(dtype)
            for n, y in zip(output_names, ys, strict=True)
        }
        if self.rows is not None:
            for name, seed in seeds.items():
                masked = np.zeros_like(seed)
                masked[self.rows] = seed[self.rows]
                seeds[name] = masked if seed.ndim == 3 else seed
        gradients = onnxtrain.vjp(model, wrt, target=target)
        grads = _run(gradients, {**arrays, **seeds}, [f"{w}_grad" for w in wrt])
        step = 1e-6 if dtype == np.float64 else 1e-2
        for name, grad in zip(wrt, grads, strict=True):
            assert grad.shape == arrays[name].shape
            direction = rng.standard_normal(grad.shape).astype(dtype)
            derivative = 0.0
            for sign in (1, -1):
                moved = arrays[name] + sign * step * direction
                ys = _run(_with(plain, name, moved), {**feeds, name: moved}, output_names)
                weights = [seeds[f"{n}_grad"] for n in output_names]
                derivative += sign * sum(
                    float((y.astype(np.float64) * w).sum())
                    for y, w in zip(ys, weights, strict=True)
                )
            derivative /= 2 * step
            tolerance = 1e-5 if dtype == np.float64 else 1e-2
            scale = float(np.linalg.norm(grad) * np.linalg.norm(direction)) + 1e-6
            assert abs(derivative - float((grad * direction).sum())) < tolerance * scale, name


def load_normalized_proto(model: onnx.ModelProto) -> onnx.ModelProto:
    plain = ir.to_proto(load_normalized(model, "portable").model)
    assert {n.domain for n in plain.graph.node} <= {""}
    return plain


def _with(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(ir.to_proto(ir.Tensor(array, name=name)))
    return copy


def _run(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: list[str] | None = None
) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    known = {x.name for x in session.get_inputs()}
    return session.run(outputs, {k: v for k, v in feeds.items() if k in known})


def _as(array: np.ndarray, dtype: type) -> np.ndarray:
    return array.astype(dtype) if array.dtype == np.float32 else array


def _dims(array: np.ndarray) -> list[int | str]:
    if array.ndim < 2:
        return list(array.shape)
    first: int | str = "batch" if array.shape[0] == BATCH else array.shape[0]
    return [first, *(_NAMES.get(d, d) for d in array.shape[1:])]
