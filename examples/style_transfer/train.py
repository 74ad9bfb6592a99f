"""Train a style with onnxtrain: ``python train.py --style-image FILE --style-weight 2 --out DIR``.

Writes to DIR: ``style.pth`` (a state dict like that of PyTorch's example), ``style.onnx`` (for
images of any size), and the output of ``fit``: ``metrics.csv``, the loss curve, checkpoints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from features import FeatureNet, load_vgg16
from loss import StyleLoss, filters
from net import TransformerNet
from stylist import Stylist, layout_of
from torch import nn

import onnxtrain
from images import crops, load, load_all
from onnxtrain.torch import from_torch

GAIN = 64.0
"""Factor of the last layer's weights and learning rate: it maps features of about 1 to 0..255."""
FACTORS = (2, 4)
"""Heights of the training images, relative to the crops: the crops have two scales."""
NAMES = ["image", "layout", "style", "own", "filters1", "filters3", "filters7"]
PARTS = ("content", "style_distance", "restoration")


@dataclass(frozen=True)
class Settings:
    """Training settings; each is a command line option."""

    dataset: str = "samples"
    style_image: str = "mosaic"
    epochs: int = 12
    steps: int = 100
    batch_size: int = 2
    image_size: int = 80
    style_size: int = 200
    content_weight: float = 1.0
    style_weight: float = 1.0
    num_channels: int = 8
    lr: float = 4e-3
    seed: int = 0


HELP = {
    "dataset": "directory of images, or 'samples' for scikit-learn's",
    "style_image": "file, or 'mosaic', 'china', 'flower'",
    "steps": "steps per epoch",
    "image_size": "side of the training crops",
    "style_size": "shorter side of the style image",
    "num_channels": "channels of the first layer: 32, 16 or 8",
}


def initial_net(settings: Settings) -> TransformerNet:
    """Return a net whose initial output is near gray, with small residual blocks."""
    torch.manual_seed(settings.seed)
    net = TransformerNet(settings.num_channels)
    with torch.no_grad():
        net.deconv3.conv2d.weight *= GAIN
        net.deconv3.conv2d.bias.fill_(128.0)
        for block in (net.res1, net.res2, net.res3, net.res4, net.res5):
            block.in2.weight.fill_(0.1)
    return net


def create_stylist(settings: Settings, net: TransformerNet) -> Stylist:
    """Return the net with its preprocessing."""
    return Stylist(net, load(settings.style_image, settings.style_size))


def create_trainer(module: StyleLoss, settings: Settings) -> onnxtrain.Trainer:
    """Return a trainer that trains only the net inside the loss."""
    example = tuple(torch.from_numpy(array) for array in batches(replace(settings, steps=1))[0])
    model = from_torch(module, example, names=NAMES)
    for output, name in zip(model.graph.outputs, ("loss", *PARTS), strict=True):
        output.name = name
    groups = [onnxtrain.optim.ParamGroup("net.deconv3.*", lr_factor=GAIN)]
    artifacts = onnxtrain.build(
        model,
        loss="loss",
        metrics=list(PARTS),
        optimizer=onnxtrain.optim.Adam(lr=settings.lr, groups=groups),
        train="net.*",
    )
    return onnxtrain.Trainer(artifacts, seed=settings.seed)


def batches(settings: Settings, epoch: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Return the batches of one epoch, with the inputs in ``NAMES``.

    Crops of images with crops of the layout, crops of the style image with their own layout, and
    random filters.
    """
    rng = np.random.default_rng((settings.seed, epoch))
    sides = [factor * settings.image_size for factor in FACTORS]
    images = [image for side in sides for image in load_all(settings.dataset, side)]
    style = load(settings.style_image, settings.style_size)
    both = np.concatenate([style, np.moveaxis(layout_of(style), 0, -1)], -1)
    size, count = settings.image_size, settings.batch_size

    def draw() -> tuple[np.ndarray, ...]:
        layout, own = crops([both], size, count, rng), crops([both], size, count, rng)
        squares = crops(images, size, count, rng)
        return squares, layout[:, 3:], own[:, :3], own[:, 3:], *filters(rng)

    return [draw() for _ in range(settings.steps)]


def train(
    settings: Settings,
    features: FeatureNet | None = None,
    out: Path | None = None,
    progress: bool | str = True,
) -> Stylist:
    """Return the trained net with its preprocessing."""
    stylist = create_stylist(settings, initial_net(settings))
    module = StyleLoss(stylist.net, settings.content_weight, settings.style_weight, features)
    trainer = create_trainer(module, settings)
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
    stylist.net.load_state_dict(learned)
    return stylist.eval()


def exported(net: nn.Module) -> ir.Model:
    """Export the net as a model for images of any size."""
    axes = [{0: "batch", 2: "height", 3: "width"}]
    example = torch.rand(2, 3, 32, 40) * 255
    model = from_torch(net.eval(), example, train=False, names=["image"], dynamic_shapes=axes)
    model.graph.outputs[0].name = "styled"
    return model


def write(stylist: Stylist, out: Path) -> None:
    """Write the state dict and the ONNX model to a directory."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(stylist.net.state_dict(), out / "style.pth")
    onnx.save(ir.to_proto(exported(stylist)), out / "style.onnx")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        parser.add_argument(option, type=kind, default=field.default, help=HELP.get(field.name))
    parser.add_argument(
        "--vgg16", type=Path, help="torchvision's weight file, for an additional perceptual loss"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/style_transfer/style"))
    options = vars(parser.parse_args(arguments))
    vgg16, out = options.pop("vgg16"), options.pop("out")
    features = load_vgg16(vgg16) if vgg16 else None
    write(train(Settings(**options), features, out), out)
    print(f"in {out}: style.pth, style.onnx")


if __name__ == "__main__":
    main()
