"""``onnxtrain example``: files to try the other commands on."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from onnxtrain.examples import digits_data, digits_model
from onnxtrain.graph.io.atomic import named_refusal, write_text


def example(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path(),
) -> None:
    """Write a small net and drawn digits: model.onnx, train.npz, test.npz and train.csv."""
    with named_refusal(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    digits_model(folder / "model.onnx")
    train, test = digits_data(1200, seed=0), digits_data(300, seed=1)
    with named_refusal(str(folder)):
        np.savez(folder / "train.npz", image=train["image"], labels=train["labels"])
        np.savez(folder / "test.npz", image=test["image"], labels=test["labels"])
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*(f"image.{i}" for i in range(64)), "labels"])
    for image, label in zip(train["image"], train["labels"], strict=True):
        writer.writerow([*(f"{x:.4g}" for x in image), int(label)])
    write_text(folder / "train.csv", table.getvalue())
    typer.echo(f"{folder}: model.onnx, train.npz, test.npz, train.csv")
