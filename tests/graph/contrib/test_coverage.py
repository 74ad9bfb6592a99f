"""Every operator that stock onnxruntime registers in its own domain has an answer."""

from __future__ import annotations

import json

import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from typer.testing import CliRunner

from onnxtrain.autodiff.explain import operators
from onnxtrain.cli.main import app
from onnxtrain.errors import PrepareError

REGISTERED = {s.name for s in get_all_operator_schema() if s.domain == "com.microsoft"}


def test_every_operator_of_the_runtime_is_answered() -> None:
    assert len(REGISTERED) >= 136
    assert {o.name for o in operators("com.microsoft")} == REGISTERED


def test_each_answer_is_a_way_or_a_reason() -> None:
    for o in operators("com.microsoft"):
        assert o.how in ("rule", "decomposed", "frozen", "none"), o.name
        assert o.why or o.how == "decomposed", o.name


def test_the_command_lists_them() -> None:
    run = CliRunner().invoke(app, ["ops", "--domain", "com.microsoft", "--json"])
    assert run.exit_code == 0
    assert {o["name"] for o in json.loads(run.stdout)} >= REGISTERED
    assert CliRunner().invoke(app, ["ops", "--domain", "com.microsoft", "--missing"]).stdout == ""


def test_a_domain_that_nobody_knows_is_refused() -> None:
    with pytest.raises(PrepareError, match="unknown domain: 'acme'"):
        operators("acme")
