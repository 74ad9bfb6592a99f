"""Train a style with onnxtrain: ``python train.py --style-image FILE --style-weight 2 --out DIR``.

Leaves in DIR: ``style.pth`` (weights in the layout of PyTorch's example), ``style.onnx`` (for
pictures of any size), and what ``fit`` leaves: ``metrics.csv``, the curve, checkpoints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from features import FeatureNet, load_vgg16, train_features
from loss import StyleLoss
from net import TransformerNet
from pictures import crops, load, load_all, planes

import onnxtrain
from onnxtrain.torch import from_torch

GAIN = 64.0
"""The last layer makes 0..255 of features of about 1: so much larger are its weights and steps."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and how; each is an option of the command line."""

    dataset: str = "samples"
    style_image: str = "mosaic"
    epochs: int = 2
    steps: int = 150
    batch_size: int = 4
    image_size: int = 96
    style_size: int = 160
    content_weight: float = 1.0
    style_weight: float = 2.0
    num_channels: int = 8
    lr: float = 2e-3
    seed: int = 0


HELP = {
    "dataset": "folder of pictures, or 'samples' for scikit-learn's",
    "style_image": "file, or 'mosaic', 'china', 'flower'",
    "steps": "in an epoch",
    "image_size": "side of the squares that are trained on",
    "style_size": "shorter side of the style picture",
    "num_channels": "of the first layer: 32, 16 or 8",
}


def fresh(settings: Settings) -> TransformerNet:
    """Return a net that starts near grey, with the contrast of a picture, and almost no blocks."""
    torch.manual_seed(settings.seed)
    net = TransformerNet(settings.num_channels)
    with torch.no_grad():
        net.deconv3.conv2d.weight *= GAIN
        net.deconv3.conv2d.bias.fill_(128.0)
        for block in (net.res1, net.res2, net.res3, net.res4, net.res5):
            block.in2.weight.fill_(0.1)
    return net


def style_loss(settings: Settings, features: FeatureNet, net: TransformerNet) -> StyleLoss:
    """Return the module that is trained: the net, the fixed features, and the style's own."""
    style = torch.from_numpy(planes(load(settings.style_image, settings.style_size))[None])
    return StyleLoss(net, features, style, settings.content_weight, settings.style_weight)


def trainer_of(module: StyleLoss, settings: Settings) -> onnxtrain.Trainer:
    """Return a trainer of the net inside the loss; the features stay as they are."""
    size = settings.image_size
    model = from_torch(module, torch.rand(2, 3, size, size) * 255, names=["image"])
    for output, name in zip(model.graph.outputs, ("loss", "content", "style"), strict=True):
        output.name = name
    groups = [onnxtrain.optim.ParamGroup("net.deconv3.*", lr_factor=GAIN)]
    artifacts = onnxtrain.build(
        model,
        loss="loss",
        metrics=["content", "style"],
        optimizer=onnxtrain.optim.Adam(lr=settings.lr, groups=groups),
        train="net.*",
    )
    return onnxtrain.Trainer(artifacts, seed=settings.seed)


def batches(settings: Settings, epoch: int = 0) -> list[tuple[np.ndarray]]:
    """Return the squares of one epoch."""
    rng = np.random.default_rng((settings.seed, epoch))
    pictures = load_all(settings.dataset, 2 * settings.image_size)
    size, count = settings.image_size, settings.batch_size
    return [(crops(pictures, size, count, rng),) for _ in range(settings.steps)]


def train(
    settings: Settings, features: FeatureNet, out: Path | None = None, progress: bool | str = True
) -> TransformerNet:
    """Return the trained net."""
    net = fresh(settings)
    trainer = trainer_of(style_loss(settings, features, net), settings)
    trainer.fit(
        lambda epoch: batches(settings, epoch),
        epochs=settings.epochs,
        schedule="cosine",
        warmup=0.05,
        directory=out,
        progress=progress,
    )
    learned = {
        name.removeprefix("net."): torch.from_numpy(v) for name, v in trainer.parameters.items()
    }
    net.load_state_dict(learned)
    return net.eval()


def exported(net: TransformerNet) -> ir.Model:
    """Return the net as a model for pictures of any size."""
    axes = [{0: "batch", 2: "height", 3: "width"}]
    example = torch.rand(2, 3, 32, 40) * 255
    model = from_torch(net.eval(), example, train=False, names=["image"], dynamic_shapes=axes)
    model.graph.outputs[0].name = "styled"
    return model


def write(net: TransformerNet, out: Path) -> None:
    """Leave the weights and the model in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), out / "style.pth")
    onnx.save(ir.to_proto(exported(net)), out / "style.onnx")


def main(arguments: list[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        parser.add_argument(option, type=kind, default=field.default, help=HELP.get(field.name))
    parser.add_argument("--feature-steps", type=int, default=180, help="for our own feature net")
    parser.add_argument("--vgg16", type=Path, help="torchvision's weight file, for better features")
    parser.add_argument("--out", type=Path, default=Path("runs/style_transfer/style"))
    given = vars(parser.parse_args(arguments))
    vgg16, out, steps = given.pop("vgg16"), given.pop("out"), given.pop("feature_steps")
    features = load_vgg16(vgg16) if vgg16 else train_features(steps)
    write(train(Settings(**given), features, out), out)
    print(f"in {out}: style.pth, style.onnx")


if __name__ == "__main__":
    main()
