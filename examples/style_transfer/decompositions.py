"""Benchmark decompositions of InstanceNormalization, Upsample and reflection padding.

``python decompositions.py`` prints a table: milliseconds of the fastest run, ``wrong`` if the
result differs from numpy's, ``refused`` if the runtime cannot load the model. ``--docs`` writes the
table to docs/style-transfer.md.
"""

from __future__ import annotations

import argparse
import re

import numpy as np
import onnx
from onnx import parser
from run import DOCS
from runtimes import ENGINES, Result, run

C, H = 32, 32  # shape in the residual blocks for num_channels=8 and a 128 x 128 image
N = H * H
TAIL = "m = Mul(n, s) y = Add(m, b)"
CENTRE = "d = Sub(x, a) q = Mul(d, d)"
ROOT = "e = Add(v, eps) r = Sqrt(e) n = Div(d, r)"
FACTOR = "e = Add(v, eps) r = Sqrt(e) k = Div(s, r) m = Mul(d, k) y = Add(m, b)"
RULE = " (the lowering's)"

NORMS = {
    "InstanceNormalization": "y = InstanceNormalization<epsilon=1e-5>(x, s1, b1)",
    "ReduceMean"
    + RULE: f"a = ReduceMean<axes=[2,3]>(x) {CENTRE} v = ReduceMean<axes=[2,3]>(q) {FACTOR}",
    "ReduceMean, scaled last": f"""a = ReduceMean<axes=[2,3]>(x) {CENTRE}
        v = ReduceMean<axes=[2,3]>(q) {ROOT} {TAIL}""",
    "GlobalAveragePool": f"a = GlobalAveragePool(x) {CENTRE} v = GlobalAveragePool(q) {FACTOR}",
    "ReduceMean of rows": f"""f = Reshape(x, rows) a = ReduceMean<axes=[3]>(f)
        d = Sub(f, a) q = Mul(d, d) v = ReduceMean<axes=[3]>(q) e = Add(v, eps) r = Sqrt(e)
        n0 = Div(d, r) n = Reshape(n0, whole) {TAIL}""",
    "MatMul with 1/n": f"""f = Reshape(x, flat) a = MatMul(f, mean) d = Sub(f, a) q = Mul(d, d)
        v = MatMul(q, mean) e = Add(v, eps) r = Sqrt(e) n0 = Div(d, r) n = Reshape(n0, whole)
        {TAIL}""",
}
ENLARGEMENTS = {
    "Upsample": 'y = Upsample<mode="nearest", scales=[1.0,1.0,2.0,2.0]>(x)',
    "Concat along new axes"
    + RULE: """u = Unsqueeze<axes=[3]>(x) c = Concat<axis=3>(u, u) h = Reshape(c, high)
        w = Unsqueeze<axes=[4]>(h) k = Concat<axis=4>(w, w) y = Reshape(k, large)""",
    "Concat of columns": """u = Reshape(x, column) c = Concat<axis=1>(u, u) w = Reshape(c, row)
        k = Concat<axis=1>(w, w) y = Reshape(k, large)""",
    "MatMul with 0/1": "c = MatMul(up, x) y = MatMul(c, upt)",
    "Tile": "u = Reshape(x, tiles) c = Tile(u, twice) y = Reshape(c, large)",
}


def _slices() -> str:
    """Return reflection padding by 1 as Slice and Concat along each axis."""
    text = []
    for axis, source, result in ((2, "x", "t"), (3, "t", "y")):
        ends = ((f"f{axis}", 1), (f"l{axis}", H - 2))
        text += [
            f"{n} = Slice<axes=[{axis}], starts=[{i}], ends=[{i + 1}]>({source})" for n, i in ends
        ]
        text.append(f"{result} = Concat<axis={axis}>(f{axis}, {source}, l{axis})")
    return " ".join(text)


REFLECTIONS = {
    "Pad": 'y = Pad<mode="reflect", pads=[0,0,1,1,0,0,1,1]>(x)',
    "Slice and Concat" + RULE: _slices(),
    "MatMul with 0/1": "c = MatMul(mirror, x) y = MatMul(c, mirrort)",
    "Gather": "c = Gather<axis=2>(x, order) y = Gather<axis=3>(c, order)",
}


def constants() -> dict[str, np.ndarray]:
    """Return the weights, shapes and matrices that the graph texts refer to."""
    rng = np.random.default_rng(0)
    s, b = rng.normal(1, 0.1, (2, C)).astype(np.float32)
    order = np.pad(np.arange(H), 1, mode="reflect")
    up, mirror = np.eye(H, dtype=np.float32).repeat(2, 0), np.eye(H, dtype=np.float32)[order]
    shapes = {
        "rows": [1, C, 1, N],
        "flat": [C, N],
        "whole": [1, C, H, H],
        "high": [1, C, 2 * H, H],
        "large": [1, C, 2 * H, 2 * H],
        "column": [C * N, 1],
        "row": [C * H, 2 * H],
        "tiles": [C * H, 1, H, 1],
        "twice": [1, 2, 1, 2],
        "order": order,
    }
    return {
        "s1": s,
        "b1": b,
        "s": s.reshape(C, 1, 1),
        "b": b.reshape(C, 1, 1),
        "eps": np.array([1e-5], np.float32),
        "mean": np.full((N, 1), 1 / N, np.float32),
        "up": up,
        "upt": up.T.copy(),
        "mirror": mirror,
        "mirrort": mirror.T.copy(),
        **{name: np.asarray(value, np.int64) for name, value in shapes.items()},
    }


def expected(x: np.ndarray) -> list[np.ndarray]:
    """Return the numpy results of the three operators."""
    known = constants()
    wide = x.astype(np.float64)
    mean, var = wide.mean((2, 3), keepdims=True), wide.var((2, 3), keepdims=True)
    normal = (wide - mean) / np.sqrt(var + 1e-5) * known["s"] + known["b"]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    return [normal, x.repeat(2, 2).repeat(2, 3), padded]


def model(body: str) -> onnx.ModelProto:
    """Return the opset 7 model of a graph text, with its constants as initializers."""
    names = set(re.findall(r"\b\w+\b", body))
    head = (
        f'<ir_version: 3, opset_import: ["": 7]> g (float[1,{C},{H},{H}] x) => (float[1,{C},a,b] y)'
    )
    parsed = parser.parse_model(f"{head} {{ {body} }}")
    for name, array in constants().items():
        if name not in names:
            continue
        kind = onnx.TensorProto.INT64 if array.dtype == np.int64 else onnx.TensorProto.FLOAT
        tensor = onnx.TensorProto(
            name=name, dims=array.shape, data_type=kind, raw_data=array.tobytes()
        )
        parsed.graph.initializer.append(tensor)
        value = parsed.graph.input.add(name=name)
        value.type.tensor_type.elem_type = kind
        for size in array.shape:
            value.type.tensor_type.shape.dim.add(dim_value=size)
    onnx.checker.check_model(parsed)
    return parsed


def cell(outcome: Result, wanted: np.ndarray) -> str:
    """Return the time in milliseconds, ``wrong`` or ``refused``."""
    if outcome.output is None:
        return "refused"
    correct = outcome.output.size == wanted.size
    correct = correct and np.abs(outcome.output.reshape(wanted.shape) - wanted).max() < 1e-4
    return f"{outcome.milliseconds:.2f}" if correct else "wrong"


def table(repeat: int) -> str:
    """Benchmark all decompositions; return a Markdown table."""
    x = np.random.default_rng(1).normal(0, 1, (1, C, H, H)).astype(np.float32)
    groups = {"InstanceNorm": NORMS, "Upsample x2": ENLARGEMENTS, "reflection": REFLECTIONS}
    flat = [
        (what, how, body) for what, variants in groups.items() for how, body in variants.items()
    ]
    wanted = dict(zip(groups, expected(x), strict=True))
    models = [model(body) for _, _, body in flat]
    columns = {}
    for engine in ENGINES:
        outcomes = run(engine, models, x, repeat)
        columns[engine] = [
            cell(f, wanted[what]) for f, (what, _, _) in zip(outcomes, flat, strict=True)
        ]
    lines = [["", "decomposition", *ENGINES], ["---"] * (2 + len(ENGINES))]
    for i, (what, how, _) in enumerate(flat):
        lines.append([what, how, *(columns[engine][i] for engine in ENGINES)])
    for what in groups:
        rows = [i for i, one in enumerate(flat) if one[0] == what]
        for title, among in (("fastest", rows), ("fastest decomposition", rows[1:])):
            best = []
            for engine in ENGINES:
                timed = [i for i in among if columns[engine][i][0].isdigit()]
                fastest = min(timed, key=lambda i: float(columns[engine][i]), default=None)
                best.append("" if fastest is None else flat[fastest][1].removesuffix(RULE))
            lines.append([what, f"*{title}*", *best])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeat", type=int, default=30)
    arguments.add_argument("--docs", action="store_true")
    options = arguments.parse_args()
    markdown = table(options.repeat)
    print(markdown)
    if options.docs:
        page = DOCS / "style-transfer.md"
        text = re.sub(
            r"(<!-- ways -->\n).*(<!-- end of ways -->)",
            lambda match: f"{match[1]}{markdown}\n{match[2]}",
            page.read_text(),
            flags=re.DOTALL,
        )
        page.write_text(text)


if __name__ == "__main__":
    main()
