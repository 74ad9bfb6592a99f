"""Every operator of onnxruntime's own domain is supported or has a documented reason."""

from __future__ import annotations

import json

import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from typer.testing import CliRunner

from onnxtrain.autodiff.explain import operators
from onnxtrain.cli.main import app
from onnxtrain.errors import PrepareError

REGISTERED = {s.name for s in get_all_operator_schema() if s.domain == "com.microsoft"}


def test_every_operator_is_covered() -> None:
    assert len(REGISTERED) >= 136
    assert {o.name for o in operators("com.microsoft")} == REGISTERED


def test_each_entry_is_an_implementation_or_a_reason() -> None:
    for o in operators("com.microsoft"):
        assert o.how in ("rule", "decomposed", "frozen", "none"), o.name
        assert o.why or o.how == "decomposed", o.name


def test_command_lists_the_operators() -> None:
    run = CliRunner().invoke(app, ["ops", "--domain", "com.microsoft", "--json"])
    assert run.exit_code == 0
    assert {o["name"] for o in json.loads(run.stdout)} >= REGISTERED
    assert CliRunner().invoke(app, ["ops", "--domain", "com.microsoft", "--missing"]).stdout == ""


def test_unknown_domain_raises() -> None:
    with pytest.raises(PrepareError, match="unknown domain: 'acme'"):
        operators("acme")
