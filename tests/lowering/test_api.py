"""``onnxtrain.lower``: names and opsets of its result, refusals, and verification."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.cli import main as cli
from onnxtrain.errors import LoweringError, MissingExtraError, ProfileError, VerificationError
from onnxtrain.expand.expansions import EXPANSIONS, LOWERING, Expansion
from onnxtrain.graph.io import load
from onnxtrain.lowering import profile as profiles
from onnxtrain.lowering.lower import lower, verified_on
from onnxtrain.lowering.profile import read_config, unsupported_nodes, write_config
from onnxtrain.profiles import names as profile_names
from onnxtrain.runtime import session
from onnxtrain.runtime.compare import Comparison, compare

from .make import f, w
from .single import Case, everything_but, feeds_of, model_of, only, op_types, run

NORM = Case("InstanceNormalization", (f(2, 3, 4, 5), w(3), w(3)))
LOOP = Case("NonZero", (f(2, 3),))


def test_weights_keep_their_names_and_are_inputs_in_ir_3():
    lowered = lower(
        model_of(NORM), only("ReduceMean", "Sub", "Mul", "Add", "Sqrt", "Div", "Reshape"), opset=7
    )
    assert {"c1", "c2"} <= {x.name for x in lowered.graph.initializer}
    assert lowered.ir_version == 3
    inputs = {x.name for x in lowered.graph.input}
    assert {x.name for x in lowered.graph.initializer} <= inputs
    assert [y.name for y in lowered.graph.output] == ["y0"]
    np.testing.assert_allclose(
        run(lowered, feeds_of(NORM))[0], run(model_of(NORM), feeds_of(NORM))[0], atol=1e-5
    )


@pytest.mark.parametrize("opset", range(7, 27))
def test_every_opset(opset: int):
    lowered = lower(model_of(NORM), opset=opset)
    assert lowered.opset_import[0].version == opset
    onnx.checker.check_model(lowered)


def test_error_lists_nodes_without_a_lowering():
    with pytest.raises(LoweringError, match="1 node\\(s\\) cannot be lowered to opset 7") as caught:
        lower(model_of(LOOP), opset=7)
    assert "node 'node': NonZero(x0: FLOAT[2,3])" in str(caught.value)
    assert "no NonZero in opset 7" in str(caught.value)
    assert "hint:" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        ({"profile": "onnxjs-9"}, "unknown profile: 'onnxjs-9'"),
        ({"opset": 6}, "unknown opset: 6"),
        ({"profile": "onnxjs-0.1.8-cpu", "opset": 13}, "onnxjs-0.1.8-cpu does not read opset 13"),
        ({}, "lower needs opset= or profile="),
    ],
)
def test_invalid_arguments(arguments, first_line: str):
    kind = ProfileError if "unknown profile" in first_line else LoweringError
    with pytest.raises(kind) as caught:
        lower(model_of(NORM), **arguments)
    assert str(caught.value).splitlines()[0].startswith(first_line)


def test_a_wrong_lowering_fails_verification(monkeypatch):
    """The wrong InstanceNormalization is the identity; ``lower`` raises and returns no model."""
    wrong = Expansion(lambda op, x, scale, bias, *, epsilon: op.Mul(x, 1.0), LOWERING)
    monkeypatch.setitem(EXPANSIONS, "InstanceNormalization", [wrong])
    with pytest.raises(VerificationError, match="differs from the original: tensor 'y0' is off by"):
        lower(model_of(NORM), everything_but("InstanceNormalization"), opset=17)


def test_compare_reports_the_first_tensor_that_differs():
    a = model_of(Case("Mul", (f(2, 3), w(3))))
    b = onnx.ModelProto()
    b.CopyFrom(a)
    b.graph.node[0].op_type = "Add"
    comparison = compare(a, b, {})
    assert comparison.difference is not None
    assert comparison.difference.startswith("tensor 'y0' is off by")
    assert compare(a, a, {}) == Comparison(None, "onnxruntime")


def _right_for_two_rows(op, x):
    rows = op.Cast(op.Shape(x, end=1), to=x.dtype)
    return op.Mul(op.Mul(x, -1.0), op.Sub(rows, 1.0))


def test_several_shapes_are_compared(monkeypatch):
    """Verification detects a lowering that is right for two rows only."""
    model = model_of(Case("Neg", (np.abs(f(2, 3)),)), symbolic=True)
    monkeypatch.setitem(EXPANSIONS, "Neg", [Expansion(_right_for_two_rows, LOWERING)])
    with pytest.raises(VerificationError, match=r"inputs of shape x0 \[3, 3\]"):
        lower(model, everything_but("Neg"), opset=17)


def test_verification_without_onnxruntime_uses_the_reference_evaluator(monkeypatch):
    def missing(*_, **__):
        raise MissingExtraError("onnxruntime is not installed")

    model = model_of(NORM)
    assert verified_on(lower(model, opset=13)) == "onnxruntime"
    monkeypatch.setattr(session, "create", missing)
    with pytest.warns(UserWarning, match="compared on onnx's reference evaluator"):
        lowered = lower(model, opset=13)
    assert verified_on(lowered) == "onnx's reference evaluator"
    assert verified_on(lower(model, opset=13, verify=False)) is None


def test_dims_replaces_symbolic_sizes():
    model = model_of(Case("Relu", (f(2, 3),)), symbolic=True)
    lowered = lower(model, opset=13, dims={"n": 5})
    assert lowered.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 5


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_valid(name: str):
    profile = profiles.find(name)
    assert profile.name == name
    assert profile.opset[0] <= profile.prefer <= profile.opset[1]
    known = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    assert set(profile.ops) <= known


def test_unsupported_nodes_are_listed():
    reported = unsupported_nodes(
        load(model_of(Case("Gelu", (f(2, 3),)))), profiles.find("onnxjs-0.1.8-cpu")
    )
    assert any("has no Gelu" in p.why and p.node == "node" for p in reported)
    assert any("opset 21" in p.why for p in reported)


def test_unknown_keys_in_a_profile_are_refused():
    with pytest.raises(ProfileError, match="not a profile: unknown keys: opps"):
        profiles.parse({"name": "x", "opps": {}})


def test_reduced_build_config_round_trip():
    model = load(model_of(NORM))
    text = write_config(model)
    assert text == "ai.onnx;21;InstanceNormalization\n"
    profile = read_config('# comment\nai.onnx;13;Add{"inputs": {}},Mul\ncom.x;1;Foo\n', "my.config")
    assert profile.opset == (13, 13)
    assert set(profile.ops) == {"Add", "Mul"}
    with pytest.raises(ProfileError, match="line 1: not an operator list"):
        read_config("Add,Mul\n", "bad.config")


def test_command_line(tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(model_of(Case("Gelu", (f(2, 3),))), source)

    def run_cli(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["onnxtrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0

    assert run_cli("lower", source, "--opset", "9", "-o", target) == 0
    assert "compared with the original on onnxruntime" in capsys.readouterr().out
    assert "Gelu" not in op_types(onnx.load(target))
    assert run_cli("check", source, "--profile", "onnxjs-0.1.8-cpu") == 1
    assert "has no Gelu" in capsys.readouterr().out
    assert run_cli("profiles", "--json") == 0
    assert "onnxjs-0.1.8-cpu" in {p["name"] for p in json.loads(capsys.readouterr().out)}
    missing = tmp_path / "c.onnx"
    assert run_cli("lower", source, "--profile", "nothing", "-o", missing) == 1
    assert "unknown profile" in capsys.readouterr().err
    assert not missing.exists()
    wrong = Expansion(lambda op, x, *, approximate: op.Mul(x, 1.0), LOWERING)
    monkeypatch.setitem(EXPANSIONS, "Gelu", [wrong])
    assert run_cli("lower", source, "--opset", "9", "-o", missing) == 1
    assert "differs from the original: tensor 'y0'" in capsys.readouterr().err
    assert not missing.exists()


def test_lower_returns_a_model_proto():
    lowered = lower(model_of(NORM), "opset-9")
    assert isinstance(lowered, onnx.ModelProto)
    assert ir.from_proto(lowered).opset_imports[""] == 9
