"""Time variants of the parts of a step on a GPU: which is fastest at which size.

    python -m benchmarks.cuda.forms                       # all; needs onnxruntime-gpu
    python -m benchmarks.cuda.forms weight --json forms.json

Each variant is a separate model, captured as a CUDA graph; times are medians in milliseconds over
back-to-back replays. The tables in ``autodiff/rules`` follow these figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.conv import INPUT_GRAD_VARIANTS
from onnxtrain.autodiff.rules.conv_weight import WEIGHT_GRAD_VARIANTS
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.graph.windows import conv_shape_of, window_geometry
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.ort_values import ort_value
from onnxtrain.targets import find

SLOW = ("lifted", "swapped")  # tried on small sizes only
# batch, channels, outs, size, kernel, stride, group: of ResNet-50, MobileNetV3, U-Net, ViT,
# ConvNeXt and SegFormer
CONVS = [
    (64, 64, 256, 56, 1, 1, 1),
    (64, 512, 128, 28, 1, 1, 1),
    (64, 1024, 256, 14, 1, 1, 1),
    (64, 2048, 512, 7, 1, 1, 1),
    (64, 16, 64, 112, 1, 1, 1),
    *[(64, c, c, s, 3, 1, 1) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))],
    (64, 128, 128, 56, 3, 2, 1),
    (64, 512, 1024, 28, 1, 2, 1),
    (64, 3, 64, 224, 7, 2, 1),
    (64, 3, 16, 224, 3, 2, 1),
    (4, 64, 64, 224, 3, 1, 1),
    (8, 256, 256, 64, 3, 1, 1),
    (1, 320, 320, 64, 3, 1, 1),
    (256, 32, 64, 14, 3, 1, 1),
    (32, 3, 768, 224, 16, 16, 1),
    (64, 128, 128, 28, 3, 1, 32),
    (64, 16, 16, 112, 3, 1, 16),
    (64, 64, 64, 112, 3, 2, 64),
    (64, 72, 72, 56, 5, 2, 72),
    (64, 120, 120, 28, 5, 1, 120),
    (64, 480, 480, 14, 3, 1, 480),
    (64, 960, 960, 7, 5, 1, 960),
    (32, 96, 96, 56, 7, 1, 96),
    (32, 192, 192, 28, 7, 1, 192),
    (8, 256, 256, 128, 3, 1, 256),
]


def model_of(build: Callable[[OpBuilder], list[ir.Value]]) -> bytes:
    """Return a model of what a function emits."""
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="form"), target="cuda")
    for i, y in enumerate(build(op)):
        y.name = f"result{i}"
        op.graph.outputs.append(y)
    model = ir.Model(op.graph, ir_version=10)
    simplify(model)
    return ir.to_proto(model).SerializeToString()


def timed(source: bytes, device: str, runs: int = 30) -> float | str:
    """Return milliseconds per run, or why there are none."""
    capture = device == "cuda"
    try:
        session = runtime.create(source, device=device, threads=None, capture=capture)
    except Exception as error:  # every form that cannot run is a cell of the table
        return str(error)[:120]
    binding, rng = session.io_binding(), np.random.default_rng(0)
    kept = []
    for x in session.get_inputs():
        value = ort_value(rng.standard_normal(x.shape).astype(np.float32), device)
        kept.append(value)
        binding.bind_ortvalue_input(x.name, value)
    for y in session.get_outputs():
        value = ort_value(np.zeros(y.shape, np.float32), device)
        kept.append(value)
        binding.bind_ortvalue_output(y.name, value)
    try:
        for _ in range(3):
            session.run_with_iobinding(binding)
    except Exception as error:  # the same
        return str(error)[-120:]
    binding.synchronize_outputs()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(runs // 5):
            session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append((time.perf_counter() - start) / (runs // 5) * 1e3)
    return round(statistics.median(times), 4)


def conv_forms(kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Give each size with a model per form of the weight's or the input's gradient."""
    forms = WEIGHT_GRAD_VARIANTS if kind == "weight" else INPUT_GRAD_VARIANTS
    for n, c, o, size, k, stride, group in CONVS:
        out = (size + 2 * (k // 2 if stride < k or k == 1 else 0) - k) // stride + 1
        p = k // 2 if stride < k or k == 1 else 0

        shapes = {"x": [n, c, size, size], "dy": [n, o, out, out], "w": [o, c // group, k, k]}

        def values(op: OpBuilder, shapes: Any = shapes) -> list[ir.Value]:
            return [op.input(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]

        win = window_geometry([k, k], [stride] * 2, None, [p] * 4)
        models = {}
        for name, form in forms.items():
            probe = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}), target="cuda")
            x, dy, w = values(probe)
            facts = conv_shape_of(probe, x, dy, w, win, group)
            if not form.fits(facts) or (name in SLOW and n * c * o * out * out > 1 << 28):
                continue
            if name in ("taps", "merged") and k > 7:
                continue

            def build(
                op: OpBuilder, form: Any = form, values: Any = values, rest: Any = (win, group)
            ) -> list[ir.Value]:
                x, dy, w = values(op)
                order = (x, dy, w) if kind == "weight" else (dy, w, x)
                return [form.build(op, *order, *rest)]

            models[name] = model_of(build)
        yield f"{n}x{c}->{o} {size}x{size} k{k} s{stride} g{group}", models


def norm_forms() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield variants of the parts of a batch normalization."""
    for n, c, s in ((64, 64, 56), (64, 256, 56), (64, 512, 28), (64, 2048, 7), (256, 32, 28)):
        yield (
            f"norm {n}x{c}x{s}x{s}",
            {
                name: model_of(lambda op, f=f, n=n, c=c, s=s: f(op, n, c, s))
                for name, f in NORMS.items()
            },
        )


def _x(op: OpBuilder, n: int, c: int, s: int, name: str = "x") -> ir.Value:
    return op.input(name, ir.DataType.FLOAT, [n, c, s, s])


def _reduce_at_once(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.ReduceSum(_x(op, n, c, s), [0, 2, 3], keepdims=0)]


def _reduce_in_two(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.ReduceSum(op.ReduceSum(_x(op, n, c, s), [2, 3], keepdims=0), [0], keepdims=0)]


def _reduce_by_product(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    ones = op.const(np.ones((s * s, 1)), ir.DataType.FLOAT)
    rows = op.MatMul(op.Reshape(_x(op, n, c, s), [n * c, s * s]), ones)
    return [op.ReduceSum(op.Reshape(rows, [n, c]), [0], keepdims=0)]


def _reduce_by_pooling(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    means = op.GlobalAveragePool(_x(op, n, c, s))
    return [op.ReduceSum(op.Reshape(means, [n, c]), [0], keepdims=0)]


def _layer_statistics(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    flat = op.Reshape(_x(op, n, c, s), [n, c, s * s])
    one = op.const(np.ones(s * s), ir.DataType.FLOAT)
    _, mean, r = op.LayerNormalization(flat, one, axis=2, epsilon=0.0, _outputs=3)
    return [mean, r]


def _square_statistics(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    x = _x(op, n, c, s)
    return [op.ReduceSum(x, [2, 3], keepdims=0), op.ReduceSumSquare(x, [2, 3], keepdims=0)]


def _centered_statistics(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    x = _x(op, n, c, s)
    mean = op.ReduceMean(op.ReduceMean(x, [2, 3], keepdims=1), [0], keepdims=1)
    d = op.Sub(x, mean)
    return [op.ReduceMean(op.ReduceMean(op.Mul(d, d), [2, 3], keepdims=0), [0], keepdims=0)]


def _affine_by_norm(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    v = [op.input(name, ir.DataType.FLOAT, [c]) for name in "abcd"]
    return [op.BatchNormalization(_x(op, n, c, s), v[0], v[1], v[2], op.Abs(v[3]))]


def _affine_by_passes(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    a, b = (op.input(name, ir.DataType.FLOAT, [c, 1, 1]) for name in "ab")
    return [op.Add(op.Mul(_x(op, n, c, s), a), b)]


def _one_pass(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.Neg(_x(op, n, c, s))]


def _two_operands(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.Mul(_x(op, n, c, s), _x(op, n, c, s, "z"))]


def _relu_gradient(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.Where(op.Greater(_x(op, n, c, s), 0.0), _x(op, n, c, s, "z"), 0.0)]


def _relu_gradient_by_cast(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    positive = op.Cast(_x(op, n, c, s), to=ir.DataType.BOOL)
    return [op.Where(positive, _x(op, n, c, s, "z"), 0.0)]


def _product_by_pooling(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.GlobalAveragePool(op.Mul(_x(op, n, c, s), _x(op, n, c, s, "z")))]


def _product_by_product(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    ones = op.const(np.ones((s * s, 1)), ir.DataType.FLOAT)
    both = op.Mul(_x(op, n, c, s), _x(op, n, c, s, "z"))
    return [op.MatMul(op.Reshape(both, [n * c, s * s]), ones)]


def _centered_gradient(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    v = [op.input(name, ir.DataType.FLOAT, [c]) for name in "abcd"]
    mean, tilt = (op.Reshape(x, [c, 1, 1]) for x in v[:2])
    tilted = op.Mul(op.Sub(_x(op, n, c, s), mean), tilt)
    return [op.BatchNormalization(op.Sub(_x(op, n, c, s, "z"), tilted), *v[:3], op.Abs(v[3]))]


def _gradient_by_one_map(op: OpBuilder, n: int, c: int, s: int) -> list[ir.Value]:
    return [op.Sub(_x(op, n, c, s, "z"), _affine_by_norm(op, n, c, s)[0])]


NORMS = {
    "sum at once": _reduce_at_once,
    "sum in two": _reduce_in_two,
    "sum by a product": _reduce_by_product,
    "sum by pooling": _reduce_by_pooling,
    "statistics by LayerNormalization": _layer_statistics,
    "statistics by squares": _square_statistics,
    "statistics centered": _centered_statistics,
    "affine by BatchNormalization": _affine_by_norm,
    "affine by passes": _affine_by_passes,
    "one pass": _one_pass,
    "two operands": _two_operands,
    "gradient of Relu": _relu_gradient,
    "gradient of Relu by a cast": _relu_gradient_by_cast,
    "sum of products by pooling": _product_by_pooling,
    "sum of products by a product": _product_by_product,
    "gradient, centered": _centered_gradient,
    "gradient by one map": _gradient_by_one_map,
}
KINDS = {
    "weight": lambda: conv_forms("weight"),
    "input": lambda: conv_forms("input"),
    "norm": norm_forms,
}


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    find("cuda")
    rows: dict[str, Any] = {}
    for kind in args.kinds:
        for title, models in KINDS[kind]():
            row = {name: timed(source, args.device) for name, source in models.items()}
            rows[f"{kind} {title}"] = row
            print(f"{kind} {title}", json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
