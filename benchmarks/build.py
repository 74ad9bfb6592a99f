"""Build time and size of gradient graphs: GPT-2-like models of growing depth.

    python benchmarks/build.py [--layers 1 4 16] [--fused] [--profile]

Prints a Markdown table. Forward nodes are those of the prepared and simplified model with its loss,
backward nodes what differentiation adds. Weights are zeros: only the graph is measured.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import numpy as np
import onnx_ir as ir

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify

F = ir.DataType.FLOAT
WRT = ["*.weight", "*.bias"]  # other initializers are the numbers of the formulas
VOCABULARY, CONTEXT, WIDTH, HEADS = 1000, 64, 96, 12


def gpt2(layers: int, fused: bool = False) -> ir.Model:
    """Return a decoder with symbolic batch and sequence, and its loss.

    As exporters write it: the linear layers are Gemm between Reshapes, Gelu is spelt out. With
    ``fused`` they are MatMul and Add, and one node.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="gpt2")
    op = OpBuilder(graph)

    def weight(name: str, *shape: int) -> ir.Value:
        tensor = ir.tensor(np.zeros(shape, np.float32), name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(F), shape=ir.Shape(shape), const_value=tensor
        )
        graph.register_initializer(value)
        op.names.taken.add(name)
        return value

    def linear(x: ir.Value, name: str, n: int, m: int) -> ir.Value:
        w, b = weight(f"{name}.weight", n, m), weight(f"{name}.bias", m)
        if fused:
            return op.Add(op.MatMul(x, w), b)
        y = op.Gemm(op.Reshape(x, [-1, n]), w, b)
        return op.reshape(y, [op.size(ids, 0), op.size(ids, 1), m])

    def gelu(x: ir.Value) -> ir.Value:
        if fused:
            return op.Gelu(x, approximate="tanh")
        u = op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), 0.044715)), (2 / np.pi) ** 0.5)
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(u), 1.0))

    def norm(x: ir.Value, name: str) -> ir.Value:
        scale, bias = weight(f"{name}.weight", WIDTH), weight(f"{name}.bias", WIDTH)
        return op.LayerNormalization(x, scale, bias, axis=-1)

    def heads(x: ir.Value) -> ir.Value:
        split = op.Reshape(x, [0, 0, HEADS, WIDTH // HEADS])
        return op.Transpose(split, perm=[0, 2, 1, 3])

    def attention(x: ir.Value, mask: ir.Value, name: str) -> ir.Value:
        joint = linear(x, f"{name}.c_attn", WIDTH, 3 * WIDTH)
        q, k, v = (heads(t) for t in op.Split(joint, axis=2, num_outputs=3, _outputs=3))
        scores = op.Div(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), (WIDTH // HEADS) ** 0.5)
        p = op.Softmax(op.Where(mask, scores, -1e9), axis=-1)
        y = op.Transpose(op.MatMul(p, v), perm=[0, 2, 1, 3])
        return linear(op.Reshape(y, [0, 0, WIDTH]), f"{name}.c_proj", WIDTH, WIDTH)

    def mlp(x: ir.Value, name: str) -> ir.Value:
        hidden = linear(x, f"{name}.c_fc", WIDTH, 4 * WIDTH)
        return linear(gelu(hidden), f"{name}.c_proj", 4 * WIDTH, WIDTH)

    ids = op.input("ids", ir.DataType.INT64, ["batch", "sequence"])
    labels = op.input("labels", ir.DataType.INT64, ["batch", "sequence"])
    places = op.iota(op.size(ids, 1))
    mask = op.GreaterOrEqual(op.Unsqueeze(places, [1]), places)
    wte = weight("wte.weight", VOCABULARY, WIDTH)
    x = op.Add(op.Gather(wte, ids), op.Gather(weight("wpe.weight", CONTEXT, WIDTH), places))
    for i in range(layers):
        x = op.Add(x, attention(norm(x, f"h.{i}.ln_1"), mask, f"h.{i}.attn"))
        x = op.Add(x, mlp(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp"))
    logits = op.MatMul(norm(x, "ln_f"), op.Transpose(wte, perm=[1, 0]))
    flat = op.Reshape(logits, [-1, VOCABULARY])
    loss = op.SoftmaxCrossEntropyLoss(flat, op.Reshape(labels, [-1]))
    loss.name = "loss"
    graph.outputs.append(loss)
    return ir.Model(graph, ir_version=10)


def measure(layers: int, fused: bool = False) -> tuple[int, int, float]:
    """Return forward nodes, backward nodes and seconds."""
    model = gpt2(layers, fused)
    forward = len(list(simplify(load_normalized(model).model).graph.all_nodes()))
    start = time.process_time()
    made = onnxtrain.grad(model, WRT)
    seconds = time.process_time() - start
    return forward, len(made.graph.node) - forward, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and size of gradient graphs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 12, 16, 64])
    parser.add_argument("--fused", action="store_true", help="MatMul, Add and Gelu nodes")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    arguments = parser.parse_args()
    measure(1)  # imports and caches
    if arguments.profile:
        model = gpt2(max(arguments.layers), arguments.fused)
        with cProfile.Profile() as profile:
            onnxtrain.grad(model, WRT)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    print("| layers | forward nodes | backward nodes | backward / forward | seconds | ms / node |")
    print("|---|---|---|---|---|---|")
    for layers in arguments.layers:
        forward, backward, seconds = measure(layers, arguments.fused)
        each = 1000 * seconds / (forward + backward)
        print(
            f"| {layers} | {forward} | {backward} | {backward / forward:.2f} "
            f"| {seconds:.2f} | {each:.2f} |"
        )


if __name__ == "__main__":
    main()
