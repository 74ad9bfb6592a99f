"""Differentiation tags of the specification against its node tests."""

import json
from pathlib import Path

from typer.testing import CliRunner

from onnxtrain.autodiff.audit import EVIDENCE, audit, to_markdown
from onnxtrain.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "differentiability.md"


def test_findings() -> None:
    found = {(f.op, f.name): (f.tag, f.proposed) for f in audit()}
    assert found["GridSample", "grid"] == ("NonDifferentiable", "Differentiable")
    assert found["FlexAttention", "Q"] == ("Unknown", "Differentiable")
    assert found["ConvInteger", "x"] == ("Unknown", "NonDifferentiable")
    assert ("MatMul", "A") not in found  # tagged right
    assert ("Bernoulli", "input") not in found  # nothing to measure
    cases = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    for (op, name), (_, proposed) in found.items():
        moving = cases.get(op, {}).get(name, [0, 0])[0]
        assert (moving > 0) == (proposed == "Differentiable"), (op, name)


def test_page_and_command_show_the_findings() -> None:
    assert PAGE.read_text(encoding="utf-8") == to_markdown(audit()), "out of date: make ops"
    run = CliRunner().invoke(app, ["ops", "--audit", "--json"])
    assert run.exit_code == 0
    assert [r["op"] for r in json.loads(run.stdout)] == [f.op for f in audit()]
    assert "GridSample" in CliRunner().invoke(app, ["ops", "--audit"]).stdout
