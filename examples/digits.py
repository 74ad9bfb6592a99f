"""Train a digits classifier on stock ONNX Runtime: a plain ONNX model in, a trained one out.

Leaves in runs/demo: artifacts/ (the directory that trains anywhere), checkpoints/, metrics.csv,
loss.png and model.onnx (trained, for any runtime).
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnxtrain
from onnxtrain.graph.builder import OpBuilder

OUT = Path("runs/demo")


def digit_net(hidden: int = 64) -> onnx.ModelProto:
    """Return an untrained classifier, image [batch, 64] -> logits [batch, 10]."""
    rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="digits")
    op = OpBuilder(graph)
    image = op.input("image", ir.DataType.FLOAT, ["batch", 64])

    def weight(name: str, *shape: int) -> ir.Value:
        scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
        tensor = ir.Tensor((scale * rng.standard_normal(shape)).astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        graph.register_initializer(value)
        return value

    h = op.Relu(op.Gemm(image, weight("fc1.weight", 64, hidden), weight("fc1.bias", hidden)))
    h = op.Dropout(h, op.const(0.2, ir.DataType.FLOAT))  # off in this file; build() turns it on
    logits = op.Gemm(h, weight("fc2.weight", hidden, 10), weight("fc2.bias", 10))
    logits.name = "logits"
    graph.outputs.append(logits)
    return ir.to_proto(ir.Model(graph, ir_version=10))


def main(epochs: int = 20) -> float:
    """Train, write the results, and return the accuracy on held-out digits."""
    shutil.rmtree(OUT, ignore_errors=True)
    data = load_digits()
    x, x_test, y, y_test = train_test_split(
        (data.data / 16).astype(np.float32), data.target.astype(np.int64), random_state=0
    )
    optimizer = onnxtrain.optim.AdamW(
        lr=1e-2, groups=[onnxtrain.optim.ParamGroup("*.bias", weight_decay=0.0)]
    )
    artifacts = onnxtrain.build(
        digit_net(), loss="cross_entropy", optimizer=optimizer, metrics=["accuracy"]
    )
    artifacts.save(OUT / "artifacts")

    trainer = onnxtrain.Trainer(OUT / "artifacts")
    trainer.fit(
        (x, y),
        epochs,
        batch_size=64,
        drop_last=True,
        validation=(x_test, y_test),
        schedule="cosine",
        directory=OUT,
    )
    trainer.export(OUT / "model.onnx")

    accuracy = trainer.evaluate((x_test, y_test)).metrics["accuracy"]
    print(f"accuracy on held-out digits: {accuracy:.1%}; results in {OUT}/")
    return accuracy


if __name__ == "__main__":
    main()
