"""Small Keras nets by tf2onnx. Runs in a venv of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import tensorflow as tf
import tf2onnx
from keras import layers

NETS = {
    "dense": lambda: [
        keras.Input((12,)),
        layers.Dense(16, "gelu"),
        layers.LayerNormalization(),
        layers.Dense(3),
    ],
    "conv": lambda: [
        keras.Input((16, 16, 3)),
        layers.Conv2D(8, 3, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.SeparableConv2D(8, 3),
        layers.PReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(4, "softmax"),
    ],
    "up": lambda: [
        keras.Input((8, 8, 2)),
        layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.Conv2D(1, 3),
    ],
    "text": lambda: [
        keras.Input((7,), dtype="int32"),
        layers.Embedding(50, 8),
        layers.Conv1D(8, 3, activation="swish"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(2),
    ],
    "gru": lambda: [
        keras.Input((5, 6)),
        layers.GRU(8, unroll=True, reset_after=True),
        layers.Dense(2, "tanh"),
    ],
    "lstm": lambda: [keras.Input((5, 6)), layers.LSTM(8), layers.Dense(2)],
}


def main(folder: Path) -> None:
    """Write all of them; say what cannot be made."""
    for name, parts in NETS.items():
        try:
            keras.utils.set_random_seed(0)
            net = keras.Sequential(parts())
            kind = net.inputs[0]
            spec = tf.TensorSpec((None, *kind.shape[1:]), kind.dtype, name="x")
            call = tf.function(lambda x, net=net: net(x, training=False), input_signature=[spec])
            tf2onnx.convert.from_function(
                call, [spec], opset=17, output_path=str(folder / f"{name}.onnx")
            )
        except Exception as error:  # a tool that fails on one model still makes the others
            print(f"not made: {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
        else:
            print(f"{name}: made", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
