"""Train, export, lower to opset 7 and run in several runtimes (``make style-transfer``).

Writes images, models and ``table.md`` to runs/style_transfer; ``--docs`` also writes images and
table to docs/. Fails if the output of a runtime differs from PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from net import TransformerNet, load_net
from runtimes import ENGINES, run
from train import Settings, create_stylist, exported, initial_net, train, write

import onnxtrain
from images import SAMPLES, center_crop, load, planes, save
from onnxtrain.lowering.profile import Profile, find

OUT = Path("runs/style_transfer")
DOCS = Path(__file__).resolve().parents[2] / "docs"
BASE_OPS = str(Path(__file__).resolve().parent / "base-ops.json")
WEIGHTS = (1.0,)
LIMIT = 1e-2
"""Maximum difference from PyTorch's output, for values in 0..255."""


@dataclass
class Row:
    """A row of the table: a model variant and its results."""

    channels: int
    form: str
    model: onnx.ModelProto
    results: dict[str, str]

    @property
    def cells(self) -> list[str]:
        """Return the cells of the table."""
        counts = Counter(node.op_type for node in self.model.graph.node)
        return [
            str(self.channels),
            self.form,
            f"{self.model.ByteSize() / 1024:.0f}",
            str(sum(counts.values()) - counts["Constant"]),
            str(counts["InstanceNormalization"]),
            str(counts["Upsample"] + counts["Resize"]),
            str(counts["Pad"]),
            *(self.results.get(engine, "") for engine in ENGINES),
        ]


HEAD = ["channels", "model", "KiB", "nodes", "InstanceNorm", "Upsample", "Pad", *ENGINES]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def forms(net: TransformerNet, size: int) -> list[Row]:
    """Return the exported model and opset 7 variants with fewer operator types, for one size."""
    model = exported(net)
    dims = {"batch": 1, "height": size, "width": size}
    channels = net.conv1.conv2d.out_channels
    return [
        Row(channels, f"exported, opset {model.opset_imports['']}", ir.to_proto(model), {}),
        Row(channels, "opset 7", onnxtrain.lower(model, opset=7, dims=dims), {}),
        Row(channels, "opset 7, no Pad", onnxtrain.lower(model, without_pad(), dims=dims), {}),
        Row(channels, "opset 7, base operators", onnxtrain.lower(model, BASE_OPS, dims=dims), {}),
    ]


def without_pad() -> Profile:
    """Return the profile of onnxjs in Node without Pad: Slice and Concat are faster there.

    Measured by decompositions.py, which also shows that its InstanceNormalization and Upsample are
    faster than their decompositions.
    """
    return replace(find("onnxjs-0.1.8-cpu"), avoid=("Pad",))


def compare(rows: list[Row], engine: str, image: np.ndarray, net: TransformerNet) -> np.ndarray:
    """Record the difference of each model from PyTorch in a runtime; return the last output."""
    with torch.no_grad():
        expected = net(torch.from_numpy(image)).numpy()
    output = expected
    for row, outcome in zip(rows, run(engine, [r.model for r in rows], image), strict=True):
        if outcome.output is None:
            if not row.form.startswith("exported"):
                raise RuntimeError(f"{engine} cannot run the model {row.form!r}: {outcome.error}")
            row.results[engine] = "refused"
            continue
        output = outcome.output.reshape(expected.shape)
        error = float(np.abs(output - expected).max())
        if not error < LIMIT:
            raise RuntimeError(f"{engine}, {row.form}: differs from PyTorch by {error}")
        row.results[engine] = f"{error:.1e}, {outcome.milliseconds / 1000:.2f} s"
    return output


def trained(settings: Settings) -> None:
    """Train one style in a separate process and write it."""
    torch.set_num_threads(1)
    out = OUT / f"style-{settings.style_weight:g}"
    write(train(settings, None, out, "plain"), out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=128, help="side of the test image")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument(
        "--reuse", action="store_true", help="use existing models instead of training"
    )
    parser.add_argument(
        "--images", action="store_true", help="only write images, do not compare runtimes"
    )
    parser.add_argument("--docs", action="store_true", help="also write images and table to docs/")
    options = parser.parse_args()
    start = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    if not options.reuse:
        settings = [
            replace(Settings(steps=options.steps), style_weight=weight) for weight in WEIGHTS
        ]
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(trained, settings))
        print(f"trained after {time.perf_counter() - start:.0f} s")
    nets = {weight: load_net(OUT / f"style-{weight:g}" / "style.pth") for weight in WEIGHTS}
    listing = [
        {"name": f"mosaic, style weight {w:g}", "file": f"style-{w:g}/style.onnx"} for w in WEIGHTS
    ]
    (OUT / "styles.json").write_text(json.dumps(listing))
    write_images(nets, OUT, 320, "png")
    if options.docs:
        write_images(nets, DOCS / "images", 320, "jpg")
    if not options.images:
        rows = compare_runtimes(nets, options.size)
        (OUT / "table.md").write_text(table(rows) + "\n")
        print(table(rows))
        if options.docs:
            update_docs(table(rows))
    print(f"done after {time.perf_counter() - start:.0f} s; images and models are in {OUT}")


def update_docs(lines: str) -> None:
    """Insert the table into docs/style-transfer.md."""
    page = DOCS / "style-transfer.md"
    text = re.sub(
        r"(<!-- table -->\n).*(<!-- end of table -->)",
        lambda match: f"{match[1]}{lines}\n{match[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    page.write_text(text)


def compare_runtimes(nets: dict[float, TransformerNet], size: int) -> list[Row]:
    """Compare the variants of the first net, and other nets at opset 7, in all runtimes."""
    image = planes(center_crop(load("china", size), size))[None]
    first, *others = nets
    rows = forms(nets[first], size)
    more = {weight: forms(nets[weight], size)[1:2] for weight in others}
    for engine in ENGINES:
        name = re.sub(r"\W+", "-", engine.lower())
        save(OUT / f"{name}-{first:g}.png", compare(rows, engine, image, nets[first]))
        for weight, one in more.items():
            save(OUT / f"{name}-{weight:g}.png", compare(one, engine, image, nets[weight]))
    small = image[..., :32, :32].copy()  # onnxjs is slow
    for channels in (16, 32):
        net = initial_net(Settings(num_channels=channels)).eval()
        larger = forms(net, 32)
        for engine in ENGINES:
            compare(larger[1:2], engine, small, net)
        rows += larger
    for row in rows:
        if row.channels == Settings.num_channels and not row.form.startswith("exported"):
            short = re.sub(r"\W+", "-", row.form)
            onnx.save(row.model, OUT / f"style-{first:g}-{short}-{size}.onnx")
    return rows


def write_images(nets: dict[float, TransformerNet], out: Path, size: int, kind: str) -> None:
    """Write the style image, the samples, and the stylized samples at each weight."""
    out.mkdir(parents=True, exist_ok=True)
    save(out / f"style_mosaic.{kind}", planes(load("mosaic", 200)))
    for name in SAMPLES:
        image = planes(center_crop(load(name, size), size))[None]
        save(out / f"style_{name}.{kind}", image)
        for weight, net in nets.items():
            with torch.no_grad():
                styled = create_stylist(Settings(), net).eval()(torch.from_numpy(image)).numpy()
            save(out / f"style_{name}_{weight:g}.{kind}", styled)


if __name__ == "__main__":
    main()
