"""Commands for models: build, plan, explain, grad, ops, lower, check, profiles and probe."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build as build_artifacts
from onnxtrain.artifacts.build_options import BuildOptions
from onnxtrain.artifacts.directory import check_replaceable
from onnxtrain.artifacts.graphs import model_key
from onnxtrain.autodiff.audit import audit as audit_tags
from onnxtrain.autodiff.explain import explain as explain_model
from onnxtrain.autodiff.explain import operators
from onnxtrain.autodiff.gradients import expand_gradients, vjp
from onnxtrain.autodiff.gradients import grad as gradients_of_output
from onnxtrain.autodiff.jacobians import save_casadi
from onnxtrain.cli.flags import Json, Model, OptionValues, Wrt, flags_from, read_dim, read_size
from onnxtrain.errors import LoweringError, PrepareError, ProbeError
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io.writer import write_text
from onnxtrain.importer.opset import NEWEST_OPSET
from onnxtrain.losses import LossTerm
from onnxtrain.lowering.lower import find_profile, verified_on
from onnxtrain.lowering.lower import lower as lower_model
from onnxtrain.lowering.placement import GPUS, nodes_off_gpu
from onnxtrain.lowering.probe.pack import run_pack, write_pack
from onnxtrain.lowering.probe.results import build_profile, format_profile, read_results
from onnxtrain.lowering.profile import find, unsupported_nodes, write_config
from onnxtrain.manifest import Manifest
from onnxtrain.optim import resolve
from onnxtrain.options import flags
from onnxtrain.planning import plan as plan_run
from onnxtrain.profiles import names as profile_names
from onnxtrain.targets import BUNDLES, TARGETS


@flags_from(BuildOptions)
def build(
    option_values: OptionValues,
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="Output directory.")],
    *,
    lr: Annotated[float | None, Option(help="Initial learning rate.")] = None,
    loss_output: Annotated[
        str | None, Option(help="Model output for the loss. Required if several outputs match.")
    ] = None,
    placement: Annotated[
        bool, Option("--placement", help="List the nodes that fall back from the GPU to the CPU.")
    ] = False,
    prefix: Annotated[str, Option(help="Prefix of all file names.")] = "",
    force: Annotated[
        bool, Option("--force", help="Replace trained weights in the output directory.")
    ] = False,
    no_check: Annotated[
        bool, Option("--no-check", help="Do not load the models with onnxruntime to check them.")
    ] = False,
) -> None:
    """Build training artifacts for a model and write them to a directory."""
    check_replaceable(output, prefix, force=force)
    if not option_values["loss"]:
        artifacts = _from_training_info(model, option_values, lr, loss_output)
        _describe(artifacts, artifacts.save(output, prefix, force=force), output)
        return
    target: str = option_values["target"]
    gpu = next((t for t in BUNDLES.get(target, (target,)) if t in GPUS), target)
    if placement and gpu not in GPUS:
        raise LoweringError(f"--placement: target {target!r} has no GPU\nhint: webgpu, web or cuda")
    optimizer = resolve(option_values["optimizer"])
    option_values["optimizer"] = optimizer if lr is None else dataclasses.replace(optimizer, lr=lr)
    if loss_output is not None:
        option_values["loss"] = [LossTerm(option_values["loss"], output=loss_output)]
    option_values["dims"] = dict(read_dim(d) for d in option_values.get("dims", ()))
    if option_values.get("recompute") == ["auto"]:
        option_values["recompute"] = "auto"
    artifacts = build_artifacts(model, check=not no_check, **option_values)
    _describe(artifacts, artifacts.save(output, prefix, force=force), output)
    if placement:
        _print_placement(artifacts, gpu)


def _from_training_info(
    model: Path, option_values: OptionValues, lr: float | None, loss_output: str | None
) -> Artifacts:
    """Return the artifacts in a file with training info; other options have no effect."""
    if not onnx.load(model, load_external_data=False).training_info:
        raise PrepareError(
            "--loss is required: the file has no training info\nhint: --loss cross_entropy"
        )
    declared = flags(BuildOptions)
    given = [f"--{declared[n].name}" for n, v in option_values.items() if v != declared[n].default]
    given += ["--lr"] if lr is not None else []
    if given:
        raise PrepareError(
            f"{', '.join(given)}: the training step is that of the file's training info\n"
            "hint: --loss builds another one"
        )
    return Artifacts.from_training_info(model, loss=loss_output)


def _describe(artifacts: Artifacts, manifest: Manifest, output: Path) -> None:
    step = manifest.model("step")
    assert step is not None
    batch = ", ".join(
        f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]"
        for t in step.inputs_of("input", "target")
    )
    count = sum(
        a.size for n, a in artifacts.values.items() if n not in _weight_names(manifest.buffers)
    )
    typer.echo(f"{output}: {count:,} trainable parameters in {len(manifest.parameters)} tensors")
    typer.echo(f"batch: {batch}")
    for line in manifest.options["repairs"]:
        typer.echo(f"changed: {line}")


def _print_placement(artifacts: Artifacts, target: str) -> None:
    for spec in artifacts.manifest.models:
        if not spec.is_for(target) or spec.role not in ("train", "step"):
            continue
        proto = artifacts.models[model_key(spec)]
        on_cpu = nodes_off_gpu(proto, target)
        copies = sum(bool(x.moved) for x in on_cpu)
        typer.echo(
            f"placement on {target}, {spec.file}: {len(on_cpu)} of {len(proto.graph.node)} nodes "
            f"run on the CPU, {copies} of them copy float tensors from the GPU"
        )
        for entry in on_cpu:
            typer.echo(f"  {entry}")


def _weight_names(weights: Any) -> set[str]:
    return {w.name for w in weights}


def plan(
    model: Annotated[
        str, Argument(help="Path of an .onnx file, or directory of artifacts from `build`.")
    ],
    memory: Annotated[str | None, Option(help="Memory budget: 2GB, 512MiB.")] = None,
    tokens: Annotated[str | None, Option(help="Batch size and sequence length: 4x512.")] = None,
    batch: Annotated[int | None, Option(help="Batch size.")] = None,
    size: Annotated[
        list[str] | None, Option(help="Value of a symbolic size: height=224; repeatable.")
    ] = None,
    loss: Annotated[
        str | None, Option(help="Loss, as for build. Default: chosen from the outputs.")
    ] = None,
    optimizer: Annotated[str, Option(help="Optimizer, as for build.")] = "adamw",
    recompute: Annotated[
        list[str] | None, Option(help="Activation checkpointing, as for build; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate the peak memory of training on the CPU, and suggest settings for a budget."""
    values = recompute or []
    report = plan_run(
        model,
        loss=loss,
        optimizer=optimizer,
        memory=memory,
        tokens=tokens,
        batch=batch,
        sizes=dict(read_size(s) for s in size or ()),
        recompute="auto" if values == ["auto"] else values,
    )
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    report.check()


def explain(
    model: Model,
    wrt: Wrt = None,
    dim: Annotated[
        list[str] | None,
        Option(help="Value of a symbolic size: batch=32, or of a dimension: x[0]=1; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how each node is differentiated, the parameters, and the cost of training."""
    report = explain_model(model, wrt or None, dims=dict(read_size(d) for d in dim or ()))
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))


def grad(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="Output .onnx file.")],
    wrt: Wrt = None,
    of: Annotated[
        str | None, Option(help="Scalar output to differentiate. Default: a VJP of all outputs.")
    ] = None,
    target: Annotated[
        str, Option(help=f"Runtime to generate operators for: {', '.join(TARGETS)}.")
    ] = "cpu",
    *,
    expand: Annotated[
        bool,
        Option(
            "--expand",
            help="Add no gradient; replace the Gradient, Adam, Adagrad and Momentum nodes of the "
            "model by standard operators.",
        ),
    ] = False,
    casadi: Annotated[
        bool,
        Option(
            "--casadi",
            help="Write OUTPUT and beside it adj_, fwd_ and fwd_adj_OUTPUT, as CasADi reads them.",
        ),
    ] = False,
) -> None:
    """Write a model that computes the gradient of a scalar output, or a vector-Jacobian product."""
    if casadi:
        for path in save_casadi(model, output, target=target):
            typer.echo(str(path))
        return
    if expand:
        if wrt or of is not None:
            raise PrepareError("--expand excludes --wrt and --of: the nodes of the model name both")
        result = expand_gradients(model, target=target)
    elif of is not None:
        result = gradients_of_output(model, wrt or None, of, target=target)
    else:
        result = vjp(model, wrt or None, target=target)
    save(result, output)
    graph = result.graph
    sizes = f"{len(graph.node)} nodes, {len(graph.input)} inputs, {len(graph.output)} outputs"
    typer.echo(f"{output}: {sizes}")


def ops(
    domain: Annotated[
        str, Option(help="Operator domain: ai.onnx (the default) or com.microsoft.")
    ] = "",
    missing: Annotated[
        bool, Option("--missing", help="List only operators that are not supported.")
    ] = False,
    audit: Annotated[
        bool,
        Option(
            "--audit",
            help="List the inputs whose differentiation tag in the ONNX specification is missing "
            "or contradicts its node tests.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the operators of a domain and how each is differentiated."""
    if audit:
        _print_audit(as_json=as_json)
        return
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


def _print_audit(*, as_json: bool) -> None:
    findings = audit_tags()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
        return
    table = Table("operator", "input", "tag", "proposed", "evidence")
    for f in findings:
        table.add_row(f.op, f"{f.index}: {f.name}", f.tag, f.proposed, f.evidence)
    Console().print(table)


_Profile = Annotated[
    str | None,
    Option(help="Runtime from `onnxtrain profiles`, or a profile or operator list file."),
]


def lower(
    model: Model,
    output: Annotated[Path, Option("--output", "-o", help="Output .onnx file.")],
    profile: _Profile = None,
    opset: Annotated[int | None, Option(help=f"Opset of the result, 7 to {NEWEST_OPSET}.")] = None,
    dim: Annotated[
        list[str] | None, Option(help="Value of a symbolic size: batch=1; repeatable.")
    ] = None,
    verify: Annotated[
        bool, Option(help="Compare with the original on random inputs before writing.")
    ] = True,
    config: Annotated[
        Path | None,
        Option(help="Also write a required-operators config for a reduced onnxruntime build."),
    ] = None,
) -> None:
    """Convert a model to an older opset or to the operators of a smaller runtime."""
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
    profile: Annotated[str, Option(help="Runtime from `onnxtrain profiles`, or a profile file.")],
    as_json: Json = False,
) -> None:
    """List the nodes that a runtime does not support; exit code 1 if there are any."""
    runtime = find_profile(profile)
    if runtime is None:
        raise LoweringError(
            f"{profile!r} is an opset, not a runtime\nhint: `onnxtrain profiles` lists runtimes"
        )
    unsupported = unsupported_nodes(load(model), runtime)
    if as_json:
        rows = [{"node": p.node, "what": p.what, "why": p.why} for p in unsupported]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for problem in unsupported:
            typer.echo(str(problem))
        count = len(unsupported)
        typer.echo(f"{runtime.name}: {f'{count} problem(s)' if count else 'runs'}")
    if unsupported:
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
    typer.echo(f"also opset-7 to opset-{NEWEST_OPSET}: all operators of that opset")


probe = typer.Typer(
    help="Run single-node models on a runtime and create its profile.",
    no_args_is_help=True,
)
_Pack = Annotated[Path, Argument(help="Folder of the test pack.")]


@probe.command()
def pack(
    folder: _Pack,
    opset: Annotated[
        list[int] | None,
        Option(help=f"Opset to write nodes for; repeatable. Default: 7 to {NEWEST_OPSET}."),
    ] = None,
) -> None:
    """Write a pack of single-node models with runners for Python, Node and browsers."""
    listing = write_pack(folder, opset or ())
    operators = {n["op"] for n in listing["nodes"]}
    typer.echo(f"{folder}: {len(listing['nodes'])} nodes of {len(operators)} operators")


@probe.command()
def run(
    folder: _Pack,
    runtime: Annotated[str, Option(help="Runtime: onnxruntime, tract or opencv.")],
    output: Annotated[Path, Option("--output", "-o", help="Output .json file for the results.")],
    provider: Annotated[
        str,
        Option(
            help="Execution provider of onnxruntime. A node that runs on the CPU counts as "
            "unsupported."
        ),
    ] = "",
    python: Annotated[
        str, Option(help="Python interpreter with the runtime. Default: this one.")
    ] = sys.executable,
) -> None:
    """Run a pack with a Python runtime; probe.mjs and probe.html in the pack run it elsewhere."""
    typer.echo(run_pack(folder, runtime, output, provider=provider, python=python))


@probe.command()
def profile(
    results: Annotated[Path, Argument(help="Results file, written by a runner.")],
    output: Annotated[Path, Option("--output", "-o", help="Output .json file for the profile.")],
    base: Annotated[
        str | None,
        Option(help="Profile for operators that the pack does not test, such as control flow."),
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of the profile. Default: the name of the output file.")
    ] = None,
) -> None:
    """Create a profile from the results of a runner."""
    base_profile = None
    if base is not None:
        base_profile = find_profile(base)
        if base_profile is None:
            raise ProbeError(
                f"--base {base} is an opset, not a runtime\n"
                "hint: `onnxtrain profiles` lists runtimes"
            )
    probed = build_profile(read_results(results), name or output.stem, base_profile)
    write_text(output, format_profile(probed))
    versions = sum(len(entry.get("since", ())) for entry in probed["ops"].values())
    typer.echo(f"{output}: {len(probed['ops'])} operators, {versions} versions")
