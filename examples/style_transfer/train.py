"""Train a style with onnxtrain: ``python train.py --style-image FILE --style-weight 2 --out DIR``.

Leaves in DIR: ``style.pth`` (weights in the layout of PyTorch's example), ``style.onnx`` (for
pictures of any size), and what ``fit`` leaves: ``metrics.csv``, the curve, checkpoints.
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
from pictures import crops, load, load_all
from stylist import Stylist, layout_of
from torch import nn

import onnxtrain
from onnxtrain.torch import from_torch

GAIN = 64.0
"""The last layer makes 0..255 of features of about 1: so much larger are its weights and steps."""
FACTORS = (2, 4)
"""So many squares are as high as a picture: details of large pictures are learned, and of small."""
NAMES = ["image", "layout", "style", "own", "filters1", "filters3", "filters7"]
PARTS = ("content", "style_distance", "restoration")


@dataclass(frozen=True)
class Settings:
    """What is trained, and how; each is an option of the command line."""

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
    "dataset": "folder of pictures, or 'samples' for scikit-learn's",
    "style_image": "file, or 'mosaic', 'china', 'flower'",
    "steps": "in an epoch",
    "image_size": "side of the squares that are trained on",
    "style_size": "shorter side of the style picture",
    "num_channels": "of the first layer; 32, 16 or 8",
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


def stylist_of(settings: Settings, net: TransformerNet) -> Stylist:
    """Return the net behind what prepares its pictures."""
    return Stylist(net, load(settings.style_image, settings.style_size))


def trainer_of(module: StyleLoss, settings: Settings) -> onnxtrain.Trainer:
    """Return a trainer of the net inside the loss; all else stays as it is."""
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
    """Return what is given in one epoch, by the names of ``NAMES``.

    That is squares of pictures, each with one of the layout; squares of the style, each with its
    own layout; and filters.
    """
    rng = np.random.default_rng((settings.seed, epoch))
    sides = [factor * settings.image_size for factor in FACTORS]
    pictures = [picture for side in sides for picture in load_all(settings.dataset, side)]
    style = load(settings.style_image, settings.style_size)
    both = np.concatenate([style, np.moveaxis(layout_of(style), 0, -1)], -1)
    size, count = settings.image_size, settings.batch_size

    def drawn() -> tuple[np.ndarray, ...]:
        layout, own = crops([both], size, count, rng), crops([both], size, count, rng)
        squares = crops(pictures, size, count, rng)
        return squares, layout[:, 3:], own[:, :3], own[:, 3:], *filters(rng)

    return [drawn() for _ in range(settings.steps)]


def train(
    settings: Settings,
    features: FeatureNet | None = None,
    out: Path | None = None,
    progress: bool | str = True,
) -> Stylist:
    """Return the trained net, behind what prepares its pictures."""
    stylist = stylist_of(settings, fresh(settings))
    module = StyleLoss(stylist.net, settings.content_weight, settings.style_weight, features)
    trainer = trainer_of(module, settings)
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
    """Return the net as a model for pictures of any size."""
    axes = [{0: "batch", 2: "height", 3: "width"}]
    example = torch.rand(2, 3, 32, 40) * 255
    model = from_torch(net.eval(), example, train=False, names=["image"], dynamic_shapes=axes)
    model.graph.outputs[0].name = "styled"
    return model


def write(stylist: Stylist, out: Path) -> None:
    """Leave the net's weights, and the whole as a model, in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(stylist.net.state_dict(), out / "style.pth")
    onnx.save(ir.to_proto(exported(stylist)), out / "style.onnx")


def main(arguments: list[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        parser.add_argument(option, type=kind, default=field.default, help=HELP.get(field.name))
    parser.add_argument("--vgg16", type=Path, help="torchvision's weight file: its features count")
    parser.add_argument("--out", type=Path, default=Path("runs/style_transfer/style"))
    given = vars(parser.parse_args(arguments))
    vgg16, out = given.pop("vgg16"), given.pop("out")
    features = load_vgg16(vgg16) if vgg16 else None
    write(train(Settings(**given), features, out), out)
    print(f"in {out}: style.pth, style.onnx")


if __name__ == "__main__":
    main()
