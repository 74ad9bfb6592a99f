"""Small models for the tests of the public functions."""

from __future__ import annotations

import re

import numpy as np
import onnx

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

NET = """net (float[N,3] x, int64[N] ids) => (float[N,2] y, float[N] norm, int64[N] best)
<float[3,2] fc.weight = {1.0,-2.0,3.0,0.5,0.25,-1.0}, float[2] fc.bias = {0.5,-0.5},
 float[5,2] table = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0}, float[2] unused = {1.0,1.0}>
{
    h = MatMul(x, fc.weight)
    i = Add(h, fc.bias)
    e = Gather(table, ids)
    s = Add(i, e)
    y = Tanh(s)
    axes = Constant <value_ints = [1]> ()
    norm = ReduceL2 <keepdims = 0> (y, axes)
    best = ArgMax <axis = 1, keepdims = 0> (y)
}"""
PARAMETERS = ["fc.weight", "fc.bias", "table"]

LOSS = """g (float[N,2] x) => (float[N,2] y, float loss, float[1] other)
<float[2] w = {1.0,2.0}> {
    y = Mul(x, w)  loss = ReduceSum <keepdims = 0> (y)
    shape = Constant <value_ints = [1]> ()  double = Add(loss, loss)  other = Reshape(double, shape)
}"""


def parse(text: str) -> onnx.ModelProto:
    """Parse the text syntax, which has no dots in names: ``fc.`` is written as ``fc__``."""
    model = onnx.parser.parse_model(HEAD + re.sub(r"\b(fc)\.", r"\1__", text))
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("__", ".")
    return model


def names(values: object) -> list[str]:
    return [v.name for v in values]  # type: ignore[attr-defined]


def numbers(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]
