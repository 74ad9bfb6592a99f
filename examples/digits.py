"""Train a digits classifier on stock ONNX Runtime, through the gradient model alone.

Builds a two-layer net as plain ONNX, lets onnxtrain differentiate it, and descends with numpy. Leaves in
runs/demo: model.onnx (trained, for any runtime), gradients.onnx (what computed the gradients) and
loss.png.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnxtrain
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import save

OUT = Path("runs/demo")


def digit_net(hidden: int = 64) -> onnx.ModelProto:
    """Give an untrained classifier with its loss: image [batch, 64], label [batch] -> loss, logits."""
    rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="digits")
    op = OpBuilder(graph)
    image = op.input("image", ir.DataType.FLOAT, ["batch", 64])
    label = op.input("label", ir.DataType.INT64, ["batch"])
    weights = {}
    for name, shape in {"w1": (64, hidden), "b1": (hidden,), "w2": (hidden, 10), "b2": (10,)}.items():
        scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
        array = (scale * rng.standard_normal(shape)).astype(np.float32)
        weights[name] = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(shape),
            const_value=ir.Tensor(array, name=name),
        )
        graph.register_initializer(weights[name])
    h = op.Relu(op.Gemm(image, weights["w1"], weights["b1"]))
    logits = op.Gemm(h, weights["w2"], weights["b2"])
    loss = op.SoftmaxCrossEntropyLoss(logits, label, reduction="mean")
    loss.name, logits.name = "loss", "logits"
    graph.outputs.extend([loss, logits])
    return ir.to_proto(ir.Model(graph, ir_version=10))


def main(epochs: int = 60, batch: int = 64, rate: float = 0.2) -> float:
    """Train, write the results, and give the accuracy on held-out digits."""
    OUT.mkdir(parents=True, exist_ok=True)
    model = digit_net()
    gradients = onnxtrain.grad(model, of="loss")
    save(gradients, OUT / "gradients.onnx")
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    values = onnxtrain.parameters(model)

    data = load_digits()
    x, x_test, y, y_test = train_test_split(
        (data.data / 16).astype(np.float32), data.target.astype(np.int64), random_state=0
    )
    losses, rng = [], np.random.default_rng(0)
    with Progress() as bar:
        task = bar.add_task("training", total=epochs)
        for _ in range(epochs):
            order = rng.permutation(len(x))
            for at in range(0, len(x), batch):
                pick = order[at : at + batch]
                loss, _, *grads = session.run(None, {"image": x[pick], "label": y[pick], **values})
                losses.append(float(loss))
                for name, grad in zip(values, grads, strict=True):
                    values[name] = values[name] - rate * grad
            bar.update(task, advance=1, description=f"loss {np.mean(losses[-20:]):.4f}")

    _, logits, *_ = session.run(None, {"image": x_test, "label": y_test, **values})
    accuracy = float((logits.argmax(1) == y_test).mean())
    trained = onnxtrain.load(model)
    for name, array in values.items():
        trained.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    save(trained, OUT / "model.onnx")
    draw(losses)
    print(f"accuracy on held-out digits: {accuracy:.1%}; results in {OUT}/")
    return accuracy


def draw(losses: list[float]) -> None:
    """Write the loss curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.semilogy(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title="digits, two-layer net, SGD")
    figure.savefig(OUT / "loss.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
