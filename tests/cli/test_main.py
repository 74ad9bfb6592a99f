"""Commands explain, grad and ops: output, files and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import onnxtrain
from onnxtrain.autodiff.explain import operators
from onnxtrain.cli import main as cli

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
MODEL = """net (float[N,3] x) => (float[N,2] y, float loss)
<float[3,2] weight = {1.0,-2.0,3.0,0.5,0.25,-1.0}, float[2] bias = {0.5,-0.5}> {
    h = MatMul(x, weight)  y = Add(h, bias)  s = Mul(y, y)  loss = ReduceSum <keepdims = 0> (s)
}"""
QUANTIZED = """net (float[4] x) => (float[4] y) <float s = {0.1}> { q = QuantizeLinear(x, s)
    y = DequantizeLinear(q, s) }"""


class Run:
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr("sys.argv", ["onnxtrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = self.capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "120")
    return Run(monkeypatch, capsys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + MODEL), path)
    return path


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    path = tmp_path / "quantized.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + QUANTIZED), path)
    return path


def test_explain(run: Run, model: Path) -> None:
    code, out, err = run("explain", model)
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["opset 21, 4 nodes", "differentiable"]
    assert "  weight: FLOAT[3,2]" in out
    assert out.rstrip("\n") == str(onnxtrain.explain(model))


def test_explain_as_json(run: Run, model: Path) -> None:
    code, out, _ = run("explain", model, "--json", "--wrt", "bias")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(onnxtrain.explain(model, "bias").to_dict()))
    assert list(json.loads(out)["parameters"]) == ["bias"]


def test_explain_lists_unsupported_nodes(run: Run, quantized: Path) -> None:
    code, out, _ = run("explain", quantized, "--wrt", "x")
    assert code == 0
    assert "not differentiable: 1 node(s) lack a rule" in out
    assert "missing 'q': QuantizeLinear(x: FLOAT[4], s: FLOAT[])" in out


def test_gradients(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "grad.onnx"
    code, out, err = run("grad", model, "-o", target)
    assert (code, err) == (0, "")
    assert onnx.load(target) == onnxtrain.vjp(model)
    assert out.startswith(f"{target}: ")
    assert "5 inputs, 4 outputs" in out


def test_gradients_of_one_output(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "grad.onnx"
    arguments = ("--of", "loss", "--wrt", "b*", "--wrt", "x", "--target", "portable")
    code, _, _ = run("grad", model, "--output", target, *arguments)
    assert code == 0
    assert onnx.load(target) == onnxtrain.grad(model, ["b*", "x"], "loss", target="portable")


def test_training_operators_expand(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "plain.onnx"
    text = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
    g (float[3] x) => (float[3] dx) {
      y = Mul (x, x)
      dx = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x)
    }"""
    onnx.save(onnx.parser.parse_model(text), source)
    assert run("grad", source, "--expand", "-o", target)[0] == 0
    assert onnx.load(target) == onnxtrain.expand_gradients(source)
    code, out, _ = run("explain", source, "--wrt", "x")
    assert "Gradient node 'gradient of y': gradient of 'y' with respect to 'x'" in out
    code, _, err = run("grad", source, "--expand", "--wrt", "x", "-o", target)
    assert (code, "--expand excludes --wrt" in err) == (1, True)


def test_ops(run: Run) -> None:
    code, out, _ = run("ops")
    assert code == 0
    assert "operator" in out
    assert "MatMul" in out


def test_ops_as_json(run: Run) -> None:
    code, out, _ = run("ops", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [set(row) for row in rows] == [{"name", "since", "how", "why"}] * len(rows)
    assert {row["how"] for row in rows} == {"rule", "body", "decomposed", "zero", "none"}
    assert all(row["why"] for row in rows if row["how"] in ("none", "zero"))
    assert [row["name"] for row in rows] == [o.name for o in operators()]


def test_nothing_is_missing(run: Run) -> None:
    assert run("ops", "--missing") == (0, "", "")
    code, out, _ = run("ops", "--missing", "--json")
    assert (code, json.loads(out)) == (0, [])


def test_python_m_onnxtrain(model: Path) -> None:
    command = [sys.executable, "-m", "onnxtrain"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{onnxtrain.__version__}\n"
    done = subprocess.run(
        [*command, "explain", str(model), "--wrt", "nope"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("PrepareError: ")


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"{onnxtrain.__version__}\n", "")


ERRORS = {  # name: (command, what the message has)
    "no file": ("explain nowhere.onnx", "LoadError: 'nowhere.onnx': no such file"),
    "unknown name": ("explain {model} --wrt wieght", "no such value in `wrt`: 'wieght'"),
    "unknown output": ("grad {model} -o {out} --of los", "hint: the model has loss"),
    "not scalar": (
        "grad {model} -o {out} --of y",
        "UndifferentiableError: grad requires an output",
    ),
    "unknown target": ("grad {model} -o {out} --target tpu", "unknown target: 'tpu'"),
    "refused": ("grad {quantized} -o {out} --wrt x", "node 'q': QuantizeLinear"),
    "no directory": ("grad {model} -o {out}/deep/er.onnx", "SaveError"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_block(
    name: str, run: Run, model: Path, quantized: Path, tmp_path: Path
) -> None:
    command, message = ERRORS[name]
    places = {"model": model, "quantized": quantized, "out": tmp_path / "grad.onnx"}
    before = sorted(tmp_path.iterdir())
    code, out, err = run(*(word.format(**places) for word in command.split()))
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before, "something was written"


def test_a_failed_run_does_not_overwrite(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "grad.onnx"
    target.write_bytes(b"old")
    code, _, _ = run("grad", model, "-o", target, "--of", "y")
    assert code == 1
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("place", [0, 1, 4])
def test_debug_shows_the_traceback(place: int, run: Run, model: Path) -> None:
    arguments = ["explain", str(model), "--wrt", "nope"]
    arguments.insert(place, "--debug")
    run.monkeypatch.setattr("sys.argv", ["onnxtrain", *arguments])
    with pytest.raises(onnxtrain.errors.PrepareError):
        cli.main()


def test_wrong_usage(run: Run, model: Path) -> None:
    assert run("explain")[0] == 2
    assert run("grad", model)[0] == 2
    assert run("nonsense")[0] == 2
