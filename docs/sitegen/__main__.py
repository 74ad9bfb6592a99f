"""Draw the images in docs/images: ``python -m sitegen`` in ``docs/``."""

from __future__ import annotations

import onnxtrain
from sitegen.bench_chart import chart, write_glance
from sitegen.contents import DOCS
from sitegen.data_flow import data_flow
from sitegen.device_table import write as write_devices
from sitegen.graph_plot import graph_plot


def small_gradient() -> str:
    """Return a plot of the gradient graph of a small net."""
    model = onnxtrain.vjp(onnxtrain.examples.digits_model(hidden=4), "fc*")
    return graph_plot(model, "Forward and backward of a small net")


def main() -> None:
    """Write the images, the summary above the benchmark chart and the table of devices."""
    drawn = {
        "data-flow": data_flow(),
        "gradient-graph": small_gradient(),
        "benchmarks-cpu": chart(),
    }
    for name, text in drawn.items():
        (DOCS / "images" / f"{name}.svg").write_text(text, encoding="utf-8")
    write_glance()
    write_devices()


if __name__ == "__main__":
    main()
