"""The whole path, ``make style-transfer``: train, export, lower to opset 7, run in real runtimes.

Leaves in runs/style_transfer: pictures, models, and ``table.md``; ``--docs`` brings pictures and
table into docs/. Ends with an error if a runtime's picture is not PyTorch's.
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
from pictures import SAMPLES, load, middle, planes, save
from runtimes import ENGINES, run
from train import Settings, exported, fresh, stylist_of, train, write

import onnxtrain
from onnxtrain.lowering.profile import Profile, find

OUT = Path("runs/style_transfer")
DOCS = Path(__file__).resolve().parents[2] / "docs"
BASE_OPS = str(Path(__file__).resolve().parent / "base-ops.json")
WEIGHTS = (1.0,)
LIMIT = 1e-2
"""How far a picture, 0..255, may be from PyTorch's."""


@dataclass
class Row:
    """A model, what it is made of, and what became of it."""

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
    """Return the rows in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def forms(net: TransformerNet, size: int) -> list[Row]:
    """Return the net as exported, and at opset 7 in fewer and fewer operators, for one size."""
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
    """Return the profile of onnxjs in Node, where slices that are joined are faster than Pad.

    decompositions.py tells so; its InstanceNormalization and Upsample are best left alone.
    """
    return replace(find("onnxjs-0.1.8-cpu"), avoid=("Pad",))


def compare(rows: list[Row], engine: str, image: np.ndarray, net: TransformerNet) -> np.ndarray:
    """Note how far each model is from PyTorch in a runtime; return the last picture."""
    with torch.no_grad():
        expected = net(torch.from_numpy(image)).numpy()
    picture = expected
    for row, outcome in zip(rows, run(engine, [r.model for r in rows], image), strict=True):
        if outcome.output is None:
            if not row.form.startswith("exported"):
                raise RuntimeError(f"{engine} refuses the model {row.form!r}: {outcome.error}")
            row.results[engine] = "refused"
            continue
        picture = outcome.output.reshape(expected.shape)
        far = float(np.abs(picture - expected).max())
        if not far < LIMIT:
            raise RuntimeError(f"{engine}, {row.form}: {far} away from PyTorch's picture")
        row.results[engine] = f"{far:.1e}, {outcome.milliseconds / 1000:.2f} s"
    return picture


def trained(settings: Settings) -> None:
    """Train one style, in a process of its own, and write it."""
    torch.set_num_threads(1)
    out = OUT / f"style-{settings.style_weight:g}"
    write(train(settings, None, out, "plain"), out)


def main() -> None:
    """Do everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=128, help="side of the picture that is styled")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--reuse", action="store_true", help="train nothing: take what is there")
    parser.add_argument("--pictures", action="store_true", help="only paint: no other runtimes")
    parser.add_argument("--docs", action="store_true", help="bring pictures and table into docs/")
    given = parser.parse_args()
    start = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    if not given.reuse:
        every = [replace(Settings(steps=given.steps), style_weight=weight) for weight in WEIGHTS]
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(trained, every))
        print(f"trained after {time.perf_counter() - start:.0f} s")
    nets = {weight: load_net(OUT / f"style-{weight:g}" / "style.pth") for weight in WEIGHTS}
    listing = [
        {"name": f"mosaic, style weight {w:g}", "file": f"style-{w:g}/style.onnx"} for w in WEIGHTS
    ]
    (OUT / "styles.json").write_text(json.dumps(listing))
    pictures(nets, OUT, 320, "png")
    if given.docs:
        pictures(nets, DOCS / "images", 320, "jpg")
    if not given.pictures:
        rows = through_runtimes(nets, given.size)
        (OUT / "table.md").write_text(table(rows) + "\n")
        print(table(rows))
        if given.docs:
            into_docs(table(rows))
    print(f"done after {time.perf_counter() - start:.0f} s; pictures and models are in {OUT}")


def into_docs(lines: str) -> None:
    """Put the table in its place in the documentation."""
    page = DOCS / "style-transfer.md"
    text = re.sub(
        r"(<!-- table -->\n).*(<!-- end of table -->)",
        lambda match: f"{match[1]}{lines}\n{match[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    page.write_text(text)


def through_runtimes(nets: dict[float, TransformerNet], size: int) -> list[Row]:
    """Compare every form of the first net in every runtime, and what else there is at opset 7."""
    image = planes(middle(load("china", size), size))[None]
    first, *others = nets
    rows = forms(nets[first], size)
    more = {weight: forms(nets[weight], size)[1:2] for weight in others}
    for engine in ENGINES:
        name = re.sub(r"\W+", "-", engine.lower())
        save(OUT / f"{name}-{first:g}.png", compare(rows, engine, image, nets[first]))
        for weight, one in more.items():
            save(OUT / f"{name}-{weight:g}.png", compare(one, engine, image, nets[weight]))
    small = image[..., :32, :32].copy()  # onnxjs takes its time
    for channels in (16, 32):
        net = fresh(Settings(num_channels=channels)).eval()
        larger = forms(net, 32)
        for engine in ENGINES:
            compare(larger[1:2], engine, small, net)
        rows += larger
    for row in rows:
        if row.channels == Settings.num_channels and not row.form.startswith("exported"):
            short = re.sub(r"\W+", "-", row.form)
            onnx.save(row.model, OUT / f"style-{first:g}-{short}-{size}.onnx")
    return rows


def pictures(nets: dict[float, TransformerNet], out: Path, size: int, kind: str) -> None:
    """Write pictures, the style, and the pictures in it, at each weight."""
    out.mkdir(parents=True, exist_ok=True)
    save(out / f"style_mosaic.{kind}", planes(load("mosaic", 200)))
    for name in SAMPLES:
        image = planes(middle(load(name, size), size))[None]
        save(out / f"style_{name}.{kind}", image)
        for weight, net in nets.items():
            with torch.no_grad():
                styled = stylist_of(Settings(), net).eval()(torch.from_numpy(image)).numpy()
            save(out / f"style_{name}_{weight:g}.{kind}", styled)


if __name__ == "__main__":
    main()
