"""Files in the style of older torch versions: the TorchScript exporter at older opsets."""

from __future__ import annotations

from . import cnn, generative, graph_and_points, language, mobile, plain, recurrent
from . import vision_transformers as vision
from .base import ZOO, ZooModel, register

REASON = "covers files that older torch versions wrote"
# Attributes became inputs along the way: Pad and Clip at 11, Squeeze at 13, reductions at 18.
OPSETS = {
    "lenet": 9,
    "mlp": 9,
    "resnet": 11,
    "mobilenet_v3": 13,
    "unet": 11,
    "style_transfer": 11,
    "super_resolution": 11,
    "bert": 14,
    "gpt2": 14,
    "llama": 17,
    "swin": 17,
    "lstm": 11,
    "gru": 13,
    "bilstm": 17,
    "rnn_tanh": 13,
    "convnext": 17,
    "moe": 16,
    "pointnet": 13,
}


def _add(original: ZooModel, opset: int) -> None:
    register(
        f"{original.name}_opset{opset}",
        *original.draws,
        batch_norm=original.batch_norm,
        dropout=original.dropout,
        legacy=REASON,
        opset=opset,
    )(original.factory)


# Imported for the models they register.
SOURCES = (cnn, generative, graph_and_points, language, mobile, plain, recurrent, vision)

for _name, _opset in OPSETS.items():
    _add(ZOO[_name], _opset)
