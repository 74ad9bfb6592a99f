"""Options are declared once: signatures, declarations, command line and manifest agree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.cli.flags import OptionValues, flags_from
from onnxtrain.cli.main import app
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.options import Flag, flags, from_arguments, option, recorded_options
from onnxtrain.training.fit import FitOptions
from tests.artifacts.models import classifier

SCORES = [onnxtrain.losses.LossTerm("cross_entropy", output="scores")]
# The function, what it takes besides options, its command, and the command's own parameters.
Declared = tuple[Callable[..., Any], set[str], str, set[str]]
DECLARED: dict[type, Declared] = {
    BuildOptions: (
        onnxtrain.build,
        {"model"},
        "build",
        {"model", "output", "lr", "loss_output", "placement", "prefix", "no_check", "force"},
    ),
    FitOptions: (
        onnxtrain.Trainer.fit,
        {"self", "data", "y"},
        "train",
        {"directory", "data", "seed", "quiet", "device", "threads"},
    ),
    FineTuneOptions: (
        onnxtrain.finetune,
        {"model", "data", "output"},
        "finetune",
        {"model", "data", "output", "preview", "quiet"},
    ),
}
ONLY_IN_PYTHON = {
    BuildOptions: {"dp", "randomness", "check"},
    FitOptions: {"callbacks", "progress", "shuffle", "drop_last", "tensorboard", "transform"},
    FineTuneOptions: {"progress"},
}
kinds = pytest.mark.parametrize("kind", DECLARED)


@kinds
def test_signature_and_declaration_agree(kind: type) -> None:
    function, besides, _, _ = DECLARED[kind]
    parameters = inspect.signature(function).parameters.values()
    spelled = {
        p.name: dataclasses.MISSING if p.default is p.empty else p.default
        for p in parameters
        if p.name not in besides
    }
    declared = {f.name: f.default for f in dataclasses.fields(kind)}
    assert spelled == declared
    assert list(spelled) == list(declared)


@kinds
def test_docstring_tells_what_each_option_means(kind: type) -> None:
    text = inspect.getdoc(DECLARED[kind][0]) or ""
    assert [f.name for f in dataclasses.fields(kind) if f"\n    {f.name}: " not in text] == []


@kinds
def test_command_line_and_declaration_agree(kind: type) -> None:
    _, _, command, own = DECLARED[kind]
    group: Any = typer.main.get_command(app)
    parameters = {p.name: p for p in group.commands[command].params}
    declared = flags(kind)
    assert set(parameters) == own | {flag.name for flag in declared.values()}
    assert {f.name for f in dataclasses.fields(kind)} - set(declared) == ONLY_IN_PYTHON[kind]
    for flag in declared.values():
        assert flag.name is not None
        parameter = parameters[flag.name]
        required = flag.default is dataclasses.MISSING
        assert parameter.opts == [f"--{flag.name.replace('_', '-')}"]
        assert parameter.secondary_opts == []
        assert parameter.help == flag.help
        assert parameter.required == required
        assert parameter.multiple == (flag.kind == list[str])
        if not required:
            assert parameter.default == flag.default


@kinds
def test_defaults_on_the_command_line_are_those_of_the_function(kind: type) -> None:
    differ = {
        name: flag.default
        for name, flag in flags(kind).items()
        for f in dataclasses.fields(kind)
        if f.name == name and flag.default != (None if f.default == () else f.default)
    }
    assert differ == ({"loss": "", "optimizer": "adamw"} if kind is BuildOptions else {})


def test_the_manifest_records_options() -> None:
    artifacts = onnxtrain.build(
        classifier(),
        loss=SCORES,
        optimizer="sgd",
        clip=0.5,
        dims={"batch": 4},
        recompute=("*",),
        precision=onnxtrain.Precision("bf16-mixed"),
    )
    options = dict(artifacts.manifest.options)
    assert options.pop("loss_scale") is None
    assert options.pop("initial_weights").keys() == {"trained", "frozen"}
    assert options.pop("repairs") == []
    compared = {"output": "scores", "activation": "softmax", "applied": False}
    assert options.pop("predictions") == {"labels": compared}
    assert options == {
        "clip": {"norm": 0.5, "value": None},
        "dims": {"batch": 4},
        "ema": None,
        "mode": "train",
        "opset": 21,
        "precision": "bf16-mixed",
        "randomness": "portable",
        "recompute": ["*"],
        "straight_through": False,
    }


def test_the_command_builds_what_the_function_builds(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(classifier().SerializeToString())
    words = [
        "--loss",
        "cross_entropy",
        "--loss-output",
        "scores",
        "--optimizer",
        "lion",
        "--lr",
        "0.5",
        "--train",
        "fc*",
        "--freeze",
        "fc1.*",
        "--metric",
        "accuracy",
        "--metric",
        "grad_norm",
        "--extra",
        "hidden",
        "--dim",
        "batch=4",
        "--clip",
        "1",
        "--accumulate",
        "2",
        "--ema",
        "0.5",
        "--precision",
        "bf16-mixed",
        "--recompute",
        "auto",
        "--target",
        "wasm",
    ]
    arguments = ["build", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "commanded"), *words]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    onnxtrain.build(
        tmp_path / "model.onnx",
        loss=SCORES,
        optimizer=onnxtrain.optim.Lion(lr=0.5),
        train="fc*",
        freeze="fc1.*",
        metrics=("accuracy", "grad_norm"),
        outputs="hidden",
        dims={"batch": 4},
        clip=1,
        accumulate=2,
        ema=0.5,
        precision="bf16-mixed",
        recompute="auto",
        target="wasm",
    ).save(tmp_path / "called")
    called = {p.name: p.read_bytes() for p in (tmp_path / "called").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "commanded").iterdir()} == called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greeting:
    """Options of a command that there is not."""

    whom: str = option(flag=Flag(str, "Whom."))
    names: tuple[str, ...] = option((), Flag(list[str], "More.", name="name"), record=list)
    times: int = option(2, Flag(int, "How often."))
    loud: bool = option(False, Flag(bool, "Whether."))
    secret: str = option("none")


def test_a_command_gets_what_was_given() -> None:
    seen: list[Any] = []

    @flags_from(Greeting)
    def greet(
        asked: OptionValues,
        where: Annotated[str, typer.Argument()],
        *,
        late: Annotated[int, typer.Option()] = 0,
    ) -> None:
        """Greet."""
        seen.append((asked, where, late))

    small = typer.Typer()
    small.command()(greet)
    assert CliRunner().invoke(small, ["here", "--whom", "you"]).exit_code == 0
    words = ["here", "--whom", "you", "--name", "a", "--name", "b", "--loud", "--late", "3"]
    assert CliRunner().invoke(small, words).exit_code == 0
    assert CliRunner().invoke(small, ["here"]).exit_code == 2
    assert CliRunner().invoke(small, ["here", "--whom", "you", "--secret", "x"]).exit_code == 2
    assert seen == [
        ({"whom": "you", "times": 2, "loud": False}, "here", 0),
        ({"whom": "you", "names": ["a", "b"], "times": 2, "loud": True}, "here", 3),
    ]


def test_arguments_become_options() -> None:
    def greet(
        where: str,
        *,
        whom: str,
        names: Any = (),
        times: int = 2,
        loud: bool = False,
        secret: str = "none",
    ) -> Greeting:
        return from_arguments(Greeting, locals())

    options = greet("here", whom="you", names=("a",))
    assert options == Greeting(whom="you", names=("a",))
    assert recorded_options(options) == {"names": ["a"]}
    with pytest.raises(KeyError):
        from_arguments(Greeting, {"whom": "you"})
