"""``onnxtrain build``: from a model to a directory that trains.

``onnxtrain plan``: the memory of a training run before it starts.

``onnxtrain explain``: how each node is differentiated.

``onnxtrain grad``: a model that computes gradients.

``onnxtrain ops``: the operators of the standard, and of onnxruntime's own domain.

``onnxtrain lower | check | profiles``: models for older opsets and smaller runtimes.

``onnxtrain probe pack | run | profile``: what a runtime really does.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build as build_artifacts
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.artifacts.graphs import model_key
from onnxtrain.autodiff.explain import explain as explain_model
from onnxtrain.autodiff.explain import operators
from onnxtrain.autodiff.gradients import grad as gradients_of_output
from onnxtrain.autodiff.gradients import vjp
from onnxtrain.cli.flags import Json, Model, OptionValues, Wrt, flags_from, read_size
from onnxtrain.errors import LoweringError, ProbeError
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.writer import write_text
from onnxtrain.losses import LossTerm
from onnxtrain.lowering.lower import find_profile, verified_on
from onnxtrain.lowering.lower import lower as lower_model
from onnxtrain.lowering.placement import GPUS, nodes_off_gpu
from onnxtrain.lowering.probe.pack import run_pack, write_pack
from onnxtrain.lowering.probe.results import build_profile, format_profile, read_results
from onnxtrain.lowering.profile import find, unsupported_nodes, write_config
from onnxtrain.optim import resolve
from onnxtrain.planning import plan as plan_run
from onnxtrain.profiles import names as profile_names
from onnxtrain.targets import BUNDLES, TARGETS


@flags_from(BuildOptions)
def build(
    option_values: OptionValues,
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="The directory to write.")],
    *,
    lr: Annotated[float | None, Option(help="Learning rate to start with.")] = None,
    loss_output: Annotated[
        str | None, Option(help="The output that the loss looks at, if there are several.")
    ] = None,
    placement: Annotated[
        bool, Option("--placement", help="Tell which nodes would leave the GPU.")
    ] = False,
    prefix: Annotated[str, Option(help="In front of every file name.")] = "",
    no_check: Annotated[
        bool, Option("--no-check", help="Do not ask onnxruntime whether it takes the models.")
    ] = False,
) -> None:
    """Write a directory of training artifacts for a model."""
    target: str = option_values["target"]
    gpu = next((t for t in BUNDLES.get(target, (target,)) if t in GPUS), target)
    if placement and gpu not in GPUS:
        raise LoweringError(f"--placement: target {target!r} has no GPU\nhint: webgpu, web or cuda")
    optimizer = resolve(option_values["optimizer"])
    option_values["optimizer"] = optimizer if lr is None else dataclasses.replace(optimizer, lr=lr)
    if loss_output is not None:
        option_values["loss"] = [LossTerm(option_values["loss"], output=loss_output)]
    option_values["dims"] = dict(read_size(d) for d in option_values.get("dims", ()))
    if option_values.get("recompute") == ["auto"]:
        option_values["recompute"] = "auto"
    artifacts = build_artifacts(model, check=not no_check, **option_values)
    manifest = artifacts.save(output, prefix)
    step = manifest.model("step")
    assert step is not None
    batch = ", ".join(
        f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]"
        for t in step.inputs_of("input", "target")
    )
    count = sum(
        a.size for n, a in artifacts.values.items() if n not in _weight_names(manifest.buffers)
    )
    typer.echo(f"{output}: {len(manifest.parameters)} parameters, {count:,} numbers to train")
    typer.echo(f"a batch is {batch}")
    for line in manifest.options["repairs"]:
        typer.echo(f"changed: {line}")
    if placement:
        _print_placement(artifacts, gpu)


def _print_placement(artifacts: Artifacts, target: str) -> None:
    for spec in artifacts.manifest.models:
        if not spec.is_for(target) or spec.role not in ("train", "step"):
            continue
        proto = artifacts.models[model_key(spec)]
        leaving = nodes_off_gpu(proto, target)
        moving = sum(bool(x.moved) for x in leaving)
        typer.echo(
            f"placement on {target}, {spec.file}: {moving} of {len(proto.graph.node)} nodes leave "
            f"the GPU with float tensors, {len(leaving) - moving} with numbers of the CPU"
        )
        for entry in leaving:
            typer.echo(f"  {entry}")


def _weight_names(weights: Any) -> set[str]:
    return {w.name for w in weights}


def plan(
    model: Annotated[str, Argument(help="An .onnx file, or a directory that `build` has made.")],
    memory: Annotated[str | None, Option(help="A budget: 2GB, 512MiB.")] = None,
    tokens: Annotated[str | None, Option(help="Sequences and their length: 4x512.")] = None,
    batch: Annotated[int | None, Option(help="The size of the batch.")] = None,
    size: Annotated[list[str] | None, Option(help="A symbolic size: height=224.")] = None,
    loss: Annotated[str | None, Option(help="As for build; found by itself if not given.")] = None,
    optimizer: Annotated[str, Option(help="As for build.")] = "adamw",
    recompute: Annotated[list[str] | None, Option(help="As for build: auto, or names.")] = None,
    as_json: Json = False,
) -> None:
    """Predict the peak of memory of training on the CPU, and tell what would fit a budget."""
    again = recompute or []
    report = plan_run(
        model,
        loss=loss,
        optimizer=optimizer,
        memory=memory,
        tokens=tokens,
        batch=batch,
        sizes=dict(read_size(s) for s in size or ()),
        recompute="auto" if again == ["auto"] else again,
    )
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    report.check()


def explain(
    model: Model,
    wrt: Wrt = None,
    dim: Annotated[
        list[str] | None, Option(help="Fix a size: batch=32, or by place: x[0]=1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show for each node whether and how it is differentiated, and what training would take."""
    report = explain_model(model, wrt or None, dims=dict(read_size(d) for d in dim or ()))
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))


def grad(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="Where to write the model.")],
    wrt: Wrt = None,
    of: Annotated[str | None, Option(help="A scalar output; else a vjp of all outputs.")] = None,
    target: Annotated[str, Option(help=f"One of {', '.join(TARGETS)}.")] = "cpu",
) -> None:
    """Write a model that computes gradients: of one scalar output, or vector-Jacobian products."""
    if of is not None:
        result = gradients_of_output(model, wrt or None, of, target=target)
    else:
        result = vjp(model, wrt or None, target=target)
    save(result, output)
    graph = result.graph
    sizes = f"{len(graph.node)} nodes, {len(graph.input)} inputs, {len(graph.output)} outputs"
    typer.echo(f"{output}: {sizes}")


def ops(
    domain: Annotated[str, Option(help="ai.onnx, or com.microsoft: onnxruntime's own.")] = "",
    missing: Annotated[bool, Option("--missing", help="Only those we cannot handle.")] = False,
    as_json: Json = False,
) -> None:
    """List the operators of the ONNX standard, or of a domain, and how each is differentiated."""
    listed = [o for o in operators(domain) if o.how == "missing" or not missing]
    if as_json:
        typer.echo(
            json.dumps(
                [{"name": o.name, "since": o.since, "how": o.how, "why": o.why} for o in listed],
                indent=2,
            )
        )
        return
    if not listed:
        return
    table = Table("operator", "since", "how", "why")
    for o in listed:
        table.add_row(o.name, str(o.since), o.how, o.why)
    Console().print(table)


_Profile = Annotated[
    str | None,
    Option(help="A runtime that `onnxtrain profiles` lists, or a profile or operator list file."),
]


def lower(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="The .onnx file to write.")],
    profile: _Profile = None,
    opset: Annotated[int | None, Option(help="Of the result, 7 to 26.")] = None,
    dim: Annotated[
        list[str] | None, Option(help="A number for a symbolic size: batch=1; repeatable.")
    ] = None,
    verify: Annotated[
        bool, Option(help="Compare with the original on random inputs before writing.")
    ] = True,
    config: Annotated[
        Path | None, Option(help="Also write the operator list of a reduced onnxruntime.")
    ] = None,
) -> None:
    """Write the model for an older opset or a smaller runtime."""
    sizes = dict(read_size(d) for d in dim or [])
    result = lower_model(model, profile, opset=opset, dims=sizes, verify=verify)
    save(result, output)
    if config is not None:
        write_text(config, write_config(load(result)))
    runtime = verified_on(result)
    verified = "not compared with the original"
    if runtime is not None:
        verified = f"compared with the original on {runtime}"
    version = result.opset_import[0].version
    typer.echo(f"{output}: opset {version}, {len(result.graph.node)} nodes, {verified}")


def check(
    model: Model,
    profile: Annotated[str, Option(help="A runtime that `onnxtrain profiles` lists, or a file.")],
    as_json: Json = False,
) -> None:
    """List the nodes that a runtime would not run, and why; exit code 1 if there are any."""
    chosen = find_profile(profile)
    if chosen is None:
        raise LoweringError("a plain opset is no runtime to check for\nhint: onnxtrain profiles")
    obstacles = unsupported_nodes(load(model), chosen)
    if as_json:
        rows = [{"node": p.node, "what": p.what, "why": p.why} for p in obstacles]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for problem in obstacles:
            typer.echo(str(problem))
        typer.echo(
            f"{chosen.name}: {len(obstacles)} problem(s)" if obstacles else f"{chosen.name}: runs"
        )
    if obstacles:
        raise typer.Exit(1)


def profiles(as_json: Json = False) -> None:
    """List the runtimes that models can be lowered to."""
    runtimes = [find(name) for name in profile_names()]
    if as_json:
        rows = [
            {
                "name": p.name,
                "version": p.version,
                "opset": p.opset,
                "operators": len(p.ops),
                "source": p.source,
                "probed": p.probed,
            }
            for p in runtimes
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("profile", "version", "opsets", "lowered to", "operators")
    for p in runtimes:
        low, high = p.opset
        table.add_row(p.name, p.version, f"{low}-{high}", str(p.prefer), str(len(p.ops)))
    Console().print(table)
    typer.echo("and opset-7 to opset-26: all operators of that opset")


probe = typer.Typer(
    help="Record what a runtime really does with single nodes, and make a profile of it.",
    no_args_is_help=True,
)
_Pack = Annotated[Path, Argument(help="The folder of a pack.")]


@probe.command()
def pack(
    folder: _Pack,
    opset: Annotated[
        list[int] | None, Option(help="To spell nodes for; repeatable. Default: 7 to 26.")
    ] = None,
) -> None:
    """Write a pack of single-node models, with runners for Python, Node and browsers."""
    listing = write_pack(folder, opset or ())
    operators = {n["op"] for n in listing["nodes"]}
    typer.echo(f"{folder}: {len(listing['nodes'])} nodes of {len(operators)} operators")


@probe.command()
def run(
    folder: _Pack,
    runtime: Annotated[str, Option(help="onnxruntime, tract or opencv.")],
    output: Annotated[Path, Option("--output", "-o", help="The results, a .json file.")],
    provider: Annotated[
        str, Option(help="Of onnxruntime: a node that it leaves to the CPU counts as refused.")
    ] = "",
    python: Annotated[
        str, Option(help="The Python that has the runtime; this one by default.")
    ] = sys.executable,
) -> None:
    """Run a pack in a runtime of Python; see the pack's probe.mjs and probe.html for others."""
    typer.echo(run_pack(folder, runtime, output, provider=provider, python=python))


@probe.command()
def profile(
    results: Annotated[Path, Argument(help="What a runner has written.")],
    output: Annotated[Path, Option("--output", "-o", help="The profile, a .json file.")],
    base: Annotated[
        str | None, Option(help="A profile, for what the pack does not tell: control flow, ...")
    ] = None,
    name: Annotated[str | None, Option(help="Of the profile; the file's by default.")] = None,
) -> None:
    """Make a profile of what a runner has found."""
    known = None
    if base is not None:
        known = find_profile(base)
        if known is None:
            raise ProbeError(f"{base}: a plain opset is no base\nhint: onnxtrain profiles")
    probed = build_profile(read_results(results), name or output.stem, known)
    write_text(output, format_profile(probed))
    versions = sum(len(entry.get("since", ())) for entry in probed["ops"].values())
    typer.echo(f"{output}: {len(probed['ops'])} operators, {versions} versions")
