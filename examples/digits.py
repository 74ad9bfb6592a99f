"""Train a digits classifier on stock ONNX Runtime: from an untrained to a trained ONNX model.

Writes to runs/demo: artifacts/ (trainable in any language), checkpoints/, metrics.csv, loss.png and
model.onnx (trained, for any runtime).
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnxtrain

OUT = Path("runs/demo")


def digit_net(hidden: int = 64) -> onnx.ModelProto:
    """Return an untrained classifier, image [batch, 64] -> logits [batch, 10]."""
    return onnxtrain.examples.digits_model(hidden=hidden, dropout=0.2)


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
        epochs=epochs,
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
