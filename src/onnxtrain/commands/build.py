"""``onnxtrain build``: from a model to a directory that trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts import build as build_artifacts
from onnxtrain.artifacts.signature import key_of
from onnxtrain.commands.common import read_size
from onnxtrain.errors import LoweringError
from onnxtrain.losses import LossTerm
from onnxtrain.lowering.placement import GPUS, nodes_off_gpu
from onnxtrain.optim import resolve


def build(
    model: Annotated[Path, typer.Argument(help="An .onnx file.")],
    output: Annotated[Path, Option("--output", "-o", help="The directory to write.")],
    loss: Annotated[str, Option(help="cross_entropy, mse:reduction=sum, an output ...")],
    optimizer: Annotated[str, Option(help="adamw, sgd:momentum=0.9 ...")] = "adamw",
    lr: Annotated[float | None, Option(help="Learning rate to start with.")] = None,
    loss_output: Annotated[
        str | None, Option(help="The output that the loss looks at, if there are several.")
    ] = None,
    train: Annotated[list[str] | None, Option(help="Parameters to train: name or glob.")] = None,
    freeze: Annotated[list[str] | None, Option(help="Parameters to leave alone.")] = None,
    metric: Annotated[list[str] | None, Option(help="accuracy, top_5, grad_norm ...")] = None,
    extra: Annotated[list[str] | None, Option(help="Outputs to give besides the loss.")] = None,
    dim: Annotated[list[str] | None, Option(help="Fix a size: batch=32.")] = None,
    mode: Annotated[str, Option(help="train or as-is.")] = "train",
    clip: Annotated[float | None, Option(help="Largest norm of the gradients.")] = None,
    accumulate: Annotated[int, Option(help="Batches per update.")] = 1,
    ema: Annotated[float | None, Option(help="Decay of a moving average of weights.")] = None,
    precision: Annotated[str, Option(help="float32, bf16-mixed or fp16-mixed.")] = "float32",
    recompute: Annotated[
        list[str] | None,
        Option(help="Compute again to save memory: auto, or scopes, nodes and boundaries by glob."),
    ] = None,
    target: Annotated[str, Option(help="cpu, cuda, wasm, webgpu, web or portable.")] = "cpu",
    steps_per_call: Annotated[
        int | None, Option(help="Also a step model for so many batches; 8 for small ones on wasm.")
    ] = None,
    placement: Annotated[
        bool, Option("--placement", help="Tell which nodes would leave the GPU.")
    ] = False,
    opset: Annotated[
        int | None, Option(help="Of all models, where a runtime wants an older one than 21.")
    ] = None,
    prefix: Annotated[str, Option(help="In front of every file name.")] = "",
) -> None:
    """Write a directory of training artifacts for a model."""
    gpu = {"web": "webgpu"}.get(target, target)
    if placement and gpu not in GPUS:
        raise LoweringError(f"--placement: target {target!r} has no GPU\nhint: webgpu, web or cuda")
    chosen = resolve(optimizer)
    if lr is not None:
        chosen = dataclasses.replace(chosen, lr=lr)
    wanted: Any = loss if loss_output is None else [LossTerm(loss, output=loss_output)]
    artifacts = build_artifacts(
        model,
        loss=wanted,
        optimizer=chosen,
        train=train or None,
        freeze=freeze or None,
        metrics=metric or (),
        outputs=extra or (),
        dims=dict(read_size(d) for d in dim or ()),
        mode=mode,
        clip=clip,
        accumulate=accumulate,
        ema=ema,
        precision=precision,
        recompute="auto" if recompute == ["auto"] else recompute or (),
        target=target,
        steps_per_call=steps_per_call,
        opset=opset,
    )
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
