"""ONNX's own node cases as an outside test of our gradients; docs/ops.md is their table."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import onnx
import pytest

import onnxtrain
from tests.node_cases import check, report
from tests.node_cases.cases import Case, load_cases
from tests.node_cases.differences import UnstableError, differences
from tests.node_cases.exceptions import compare, load_exceptions
from tests.node_cases.run import verdicts


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases()


def broad(cases: list[Case]) -> list[Case]:
    """One or two cases of every operator, and a body with the case that it belongs to."""
    chosen: dict[str, Case] = {}
    ordered = sorted(cases, key=lambda c: (c.op, c.name))
    for _, group in groupby(ordered, key=lambda c: c.op):
        members = [c for c in group if not c.unusable] or []
        own = [c for c in members if not c.is_twin]
        picked = [*own[:1], *own[-1:]]
        names = {c.name for c in picked}
        picked += [c for c in members if c.is_twin and c.base in names][:1]
        chosen |= {c.name: c for c in picked}
    return list(chosen.values())


def test_some_cases_of_every_operator(cases):
    chosen = broad(cases)
    assert len(chosen) >= 250
    checked = verdicts(chosen)
    assert sum(v.stable for v in checked) >= 200
    assert not compare(checked, load_exceptions())


@pytest.mark.full
def test_all_cases(cases):
    checked = verdicts(cases, jobs=2)
    stable = sum(v.stable for v in checked)
    passed = sum(v.outcome == check.PASSED for v in checked)
    assert [f"{v.name}: {v.reason}" for v in checked if v.outcome == check.FAILED] == []
    assert compare(checked, load_exceptions()) == []
    assert stable >= 950
    assert passed >= 0.97 * stable
    page = report.PATH.read_text(encoding="utf-8")
    if report.versions() in page:
        assert page == report.text(checked), "out of date: python -m tests.node_cases --write"


def test_listed_exceptions_exist_and_have_reasons(cases):
    names = {case.name for case in cases}
    listed = load_exceptions()
    assert set(listed) <= names
    assert all(len(reason) > 10 for reason in listed.values())


def test_a_wrong_gradient_is_found(cases, monkeypatch):
    case = next(c for c in cases if c.name == "test_exp")
    assert check.check(case).outcome == check.PASSED
    right = onnxtrain.vjp

    def wrong(*args, **kwargs):
        model = right(*args, **kwargs)
        name = model.graph.output[-1].name
        model.graph.node[-1].output[:] = ["unscaled"]
        two = onnx.TensorProto(name="two", data_type=1, dims=[], float_data=[1.02])
        model.graph.initializer.append(two)
        model.graph.node.add(op_type="Mul", input=["unscaled", "two"], output=[name])
        return model

    monkeypatch.setattr(onnxtrain, "vjp", wrong)
    verdict = check.check(case)
    assert verdict.outcome == check.FAILED
    assert verdict.reason.startswith("gradient of x")


def test_a_body_with_another_gradient_is_found():
    own = check.Verdict("test_a", "A", check.PASSED, gradients={"x": np.ones(3, np.float32)})
    same = replace(own, name="test_a_expanded")
    other = replace(same, gradients={"x": np.array([1, 1, 1.01], np.float32)})
    assert check.compare_twin(own, same).outcome == check.PASSED
    assert check.compare_twin(own, other).outcome == check.FAILED


def _relu(x: np.ndarray) -> Case:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[{x.size}] x) => (float[{x.size}] y)'
        "{ y = Relu(x) }"
    )
    return Case(
        "test_relu_here",
        "Relu",
        model.SerializeToString(),
        {"x": x},
        {"y": np.maximum(x, 0)},
        ("x",),
        ("y",),
    )


def test_a_kink_is_left_by_a_move():
    assert not differences(_relu(np.array([-1.0, 2.0], np.float32))).moved
    at_kink = differences(_relu(np.array([0.0, 2.0], np.float32)))
    assert at_kink.moved
    assert np.all(at_kink.feeds["x"] != 0)


def test_no_engine_with_the_expected_outputs_is_no_difference():
    case = _relu(np.array([-1.0, 2.0], np.float32))
    other = replace(case, expected={"y": np.array([5.0, 2.0], np.float32)})
    with pytest.raises(UnstableError, match="not the expected"):
        differences(other)


def test_the_same_cases_every_time(cases):
    """The data of a case does not depend on what drew random numbers before."""
    sample = next(c for c in cases if c.name == "test_relu")
    assert sample.inputs["x"].shape == (3, 4, 5)
    before = np.random.get_state(legacy=False)
    load_cases()
    after = np.random.get_state(legacy=False)
    assert str(before) == str(after)


def test_the_table_is_sorted_and_complete():
    checked = [
        check.Verdict("test_b", "B", check.PASSED, stable=True),
        check.Verdict("test_a", "A", check.SKIPPED, "random: Dropout"),
    ]
    checked.append(check.Verdict("test_b_expanded", "B", check.PASSED, stable=True))
    text = report.text(checked)
    assert "| B | 1 | 1 | 1 |  |  |  |  | 1 of 1 |" in text
    assert "2 cases of 2 operators: 1 have a stable difference" in text
    assert text.index("| A |") < text.index("| B |")
    assert "- **A**, random: Dropout: a" in text


def test_counts_of_the_readme_are_those_of_the_page():
    old = report.README.read_text(encoding="utf-8")
    page = report.PATH.read_text(encoding="utf-8")
    assert report.readme(old, page) == old, "out of date: python -m tests.node_cases --write"
