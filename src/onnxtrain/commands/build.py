"""``onnxtrain build``: from a model to a directory that trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts import build as build_artifacts
from onnxtrain.artifacts.request import BuildRequest
from onnxtrain.artifacts.signature import key_of
from onnxtrain.commands.common import Model, read_size
from onnxtrain.commands.from_options import Asked, with_flags_of
from onnxtrain.errors import LoweringError
from onnxtrain.losses import LossTerm
from onnxtrain.lowering.placement import GPUS, nodes_off_gpu
from onnxtrain.optim import resolve
from onnxtrain.targets import BUNDLES


@with_flags_of(BuildRequest)
def build(
    asked: Asked,
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
    target: str = asked["target"]
    gpu = next((t for t in BUNDLES.get(target, (target,)) if t in GPUS), target)
    if placement and gpu not in GPUS:
        raise LoweringError(f"--placement: target {target!r} has no GPU\nhint: webgpu, web or cuda")
    optimizer = resolve(asked["optimizer"])
    asked["optimizer"] = optimizer if lr is None else dataclasses.replace(optimizer, lr=lr)
    if loss_output is not None:
        asked["loss"] = [LossTerm(asked["loss"], output=loss_output)]
    asked["dims"] = dict(read_size(d) for d in asked.get("dims", ()))
    if asked.get("recompute") == ["auto"]:
        asked["recompute"] = "auto"
    artifacts = build_artifacts(model, check=not no_check, **asked)
    manifest = artifacts.save(output, prefix)
    step = manifest.model("step")
    assert step is not None
    batch = ", ".join(
        f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]"
        for t in step.inputs_of("input", "target")
    )
    count = sum(a.size for n, a in artifacts.values.items() if n not in _names(manifest.buffers))
    typer.echo(f"{output}: {len(manifest.parameters)} parameters, {count:,} numbers to train")
    typer.echo(f"a batch is {batch}")
    for line in manifest.options["repairs"]:
        typer.echo(f"changed: {line}")
    if placement:
        _tell_placement(artifacts, gpu)


def _tell_placement(artifacts: Artifacts, target: str) -> None:
    for spec in artifacts.manifest.models:
        if not spec.is_for(target) or spec.role not in ("train", "step"):
            continue
        proto = artifacts.models[key_of(spec)]
        leaving = nodes_off_gpu(proto, target)
        moving = sum(bool(x.moved) for x in leaving)
        typer.echo(
            f"placement on {target}, {spec.file}: {moving} of {len(proto.graph.node)} nodes leave "
            f"the GPU with float tensors, {len(leaving) - moving} with numbers of the CPU"
        )
        for entry in leaving:
            typer.echo(f"  {entry}")


def _names(weights: Any) -> set[str]:
    return {w.name for w in weights}
