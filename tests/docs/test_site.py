"""The generated parts of the site: contents, command line, profiles, plots, charts."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import onnxtrain
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from sitegen import api, bench_chart, command_line, contents, device_table, graph_plot, profiles  # noqa: E402


def test_every_page_has_one_place() -> None:
    pages = [page for section in contents.sections().values() for page in section]
    assert len(pages) == len(set(pages))
    written = {p.stem for p in DOCS.glob("*.md")} - {"index"}
    assert written <= set(pages)
    made = [p for p in pages if not p.startswith(contents.MADE)]
    assert [p for p in made if not (DOCS / f"{p}.md").exists()] == []


def test_the_command_line_has_every_command_and_option() -> None:
    page = command_line.page()
    for name in ("train", "lr-find", "export", "probe pack", "example"):
        assert f"\n## onnxtrain {name}\n" in page
    assert "`--best`" in page
    assert "``" not in page.replace("```", "")  # an empty default is none
    assert "gradients" not in re.findall(r"^## onnxtrain (.+)$", page, re.MULTILINE)  # an old name


def test_every_profile_is_listed() -> None:
    page = profiles.page()
    assert [p.stem for p in profiles.FOLDER.glob("*.json") if f"`{p.stem}`" not in page] == []


def test_the_page_of_devices_has_the_table_of_the_code() -> None:
    page = device_table.PAGE.read_text(encoding="utf-8")
    written = page.partition(device_table.BEGIN)[2].partition(device_table.END)[0].strip()
    assert written == device_table.table()
    assert "untested" in written
    for name in (path.stem for path in device_table.RESULTS.glob("*.json")):
        run = device_table.results(name)
        assert run is not None
        assert len(run["nets"]) == 10
        assert re.search(rf"`{name}` .*\d+ of 10 \({run['date']}\) .* [\d.]+ x CPU", written)


def test_every_public_name_is_in_the_api(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    api.write(tmp_path)
    text = (tmp_path / "onnxtrain.md").read_text(encoding="utf-8")
    losses = (tmp_path / "onnxtrain-losses.md").read_text(encoding="utf-8")
    assert ".. py:data:: onnxtrain.losses.LossLike\n\n   One of: ``str``" in losses
    public = [n for n in onnxtrain.__all__ if not inspect.ismodule(getattr(onnxtrain, n))]
    assert len(public) > 20
    assert [n for n in public if f"onnxtrain.{n}\n" not in text] == []


def test_graph_plot_shows_all_nodes() -> None:
    model = onnxtrain.vjp(onnxtrain.examples.digits_model(hidden=2))
    plot = ElementTree.fromstring(graph_plot.graph_plot(model, "small"))
    words = [e.text for e in plot.iter() if e.tag.endswith("text")]
    for node in model.graph.node:
        assert node.op_type in words
    with pytest.raises(ValueError, match="too many"):
        graph_plot.graph_plot(model, "small", max_nodes=3)


TABLE = """### 1 thread

| workload | optimizer | onnxtrain, ms | / a | / b |
| --- | --- | ---: | ---: | ---: |
| MLP | sgd | 0.5 (0.4-0.6) | 0.51 (0.39-0.87), <= 0.45 **missed by 13%** | wrong |
| CNN | adamw | 2.0 (1.0-3.0) | 0.80 (0.7-0.9) | 1.20 (1.1-1.3) |

"""


def test_ratios_of_a_page() -> None:
    engines, values = bench_chart.ratios(TABLE)
    assert engines == ["a", "b"]
    assert values == {"MLP, sgd": {"a": 0.51}, "CNN, adamw": {"a": 0.8, "b": 1.2}}
    text = bench_chart.glance(TABLE)
    assert "| CNN | adamw | 2.0 | b | 1.20 |" in text
    assert "do not quote" not in text
    assert "do not quote" in bench_chart.glance(TABLE + bench_chart.WARNING)
