"""Models that compute gradients, from models that compute values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradient_model import GradientModel
from onnxtrain.autodiff.load_normalized import load_normalized
from onnxtrain.autodiff.registry import find_rule
from onnxtrain.autodiff.selection import select_outputs, select_wrt
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import Source
from onnxtrain.targets import Target, find

Names = str | Sequence[str] | None


def vjp(
    model: Source, wrt: Names = None, outputs: Names = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes vector-Jacobian products besides the model's own outputs.

    Its inputs are the model's, then the lifted parameters in ``wrt`` order (without defaults), then
    ``<output>_grad`` for each chosen output; its outputs are the model's, then ``<name>_grad`` for
    each ``wrt``. A name that is taken gets ``.2``, ``.3`` ...; the order is the contract.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: names or glob patterns of initializers and inputs; ``None`` stands for every
            initializer that works as a weight: no constants, no running statistics.
        outputs: which outputs get a cotangent; ``None`` stands for every float output.
        target: the kind of runtime that forms are chosen for: ``cpu``, ``cuda``, ``wasm``,
            ``webgpu`` or ``portable``.

    Raises:
        UndifferentiableError: naming every node on the way that has no gradient.
        PrepareError: if a name does not exist, with near matches.
    """
    work, wrt_values, chosen = start(model, wrt, outputs, target)
    made = GradientModel(work, target)
    made.lift(wrt_values)
    cotangents = {y: made.input_like(f"{y.name}_grad", y) for y in chosen}
    grads = made.differentiate(cotangents, wrt_values)
    for x in wrt_values:
        made.output(f"{x.name}_grad", grads[x], x)
    return made.finish()


def grad(
    model: Source, wrt: Names = None, of: str | None = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes the gradient of one scalar output besides the model's outputs.

    Like :func:`vjp`, without cotangent inputs.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`vjp`.
        of: an output with one element, of shape [] or [1]; ``None`` stands for the only output, or
            for the one called ``loss``.
        target: as in :func:`vjp`.
    """
    work, wrt_values, chosen = start(model, wrt, of, target, _the_output)
    (loss,) = chosen
    if S.dims_of(loss) not in ((), (1,)):
        raise UndifferentiableError(
            f"only an output with one element has a gradient: {S.describe_value(loss)}\n"
            "hint: reduce it in the model, or use onnxtrain.vjp with a cotangent"
        )
    made = GradientModel(work, target)
    made.lift(wrt_values)
    seed = made.op.const(1.0 if S.dims_of(loss) == () else [1.0], loss.dtype)
    grads = made.differentiate({loss: seed}, wrt_values)
    for x in wrt_values:
        made.output(f"{x.name}_grad", grads[x], x)
    return made.finish()


def jvp(
    model: Source, wrt: Names = None, outputs: Names = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes Jacobian-vector products besides the model's own outputs.

    Its inputs are the model's, then the lifted parameters in ``wrt`` order, then ``<name>_tangent``
    for each ``wrt``; its outputs are the model's, then ``<output>_tangent`` for each chosen output.
    """
    work, wrt_values, chosen = start(model, wrt, outputs, target)
    made = GradientModel(work, target)
    made.lift(wrt_values)
    op, graph = made.op, made.graph
    tangents = {x: made.input_like(f"{x.name}_tangent", x) for x in wrt_values}
    # v -> J v is the transpose of u -> J^T u. That is linear in u, so the result has no u in it.
    probes = {y: made.input_like(f"{y.name}_probe", y) for y in chosen}
    grads = made.differentiate(probes, wrt_values)
    pulled: dict[ir.Value, ir.Value] = {}
    for x, g in grads.items():
        if g is not None:
            pulled[g] = op.Add(pulled[g], tangents[x]) if g in pulled else tangents[x]
    output_tangents = made.differentiate(pulled, list(probes.values()))
    for y in chosen:
        made.output(f"{y.name}_tangent", output_tangents.get(probes[y]), y)
    for y, probe in probes.items():
        probe.replace_all_uses_with(op.zeros_like(y))
        graph.inputs.remove(probe)
    graph.sort()
    return made.finish()


def parameters(model: Source, wrt: Names = None) -> dict[str, np.ndarray]:
    """Return the values of initializers that ``wrt`` names, in the order of :func:`vjp`'s inputs.

    Inputs of the model among ``wrt`` have no value and are left out.
    """
    work = load_normalized(model)
    return {
        x.name or "": np.array(x.const_value.numpy())
        for x in select_wrt(work, wrt)
        if x.const_value is not None
    }


def start(
    model: Source,
    wrt: Names,
    outputs: Names,
    target: str | Target,
    choose: Callable[[ir.Model, Names], list[ir.Value]] = select_outputs,
) -> tuple[ir.Model, list[ir.Value], list[ir.Value]]:
    """Return the model in the normal form, the values of ``wrt`` and the chosen outputs."""
    work = load_normalized(model, find(target))
    chosen = choose(work, outputs)
    wrt_values = select_wrt(work, wrt)
    if wrt is not None:
        _refuse_settings(wrt_values)
    if not wrt_values:
        raise UndifferentiableError(
            "the model has no trainable parameters: no weight reaches a float output\n"
            "hint: name inputs or initializers in `wrt`"
        )
    return work, wrt_values, chosen


def _refuse_settings(wrt: Sequence[ir.Value]) -> None:
    """Refuse values that only say how to compute: their gradient would be zero, and wrong."""
    for x in wrt:
        reasons = []
        for node, i in x.uses():
            rule = find_rule(node)
            if rule is None or i not in rule.constant_inputs:
                break
            reasons.append(f"  node {node.name!r}: {S.describe(node)}: {rule.constant_inputs[i]}")
        else:
            if reasons:
                raise UndifferentiableError(
                    f"no gradient for {x.name!r}:\n" + "\n".join(reasons) + "\n"
                    "hint: leave it out of `wrt`"
                )


def _the_output(model: ir.Model, of: Names) -> list[ir.Value]:
    """Return the output that ``of`` names; ``None`` stands for the only one, or for ``loss``."""
    names = [y.name or "" for y in model.graph.outputs]
    if of is None:
        of = names[0] if len(names) == 1 else "loss" if "loss" in names else None
    outputs = [] if of is None else select_outputs(model, of, "of")
    if len(outputs) != 1:
        choice = [y.name for y in outputs] or names
        raise PrepareError(
            f"which output? the model has {', '.join(map(str, choice))}\n"
            f"hint: pass of={choice[0]!r}, say"
        )
    return outputs


__all__ = ["Names", "Source", "grad", "jvp", "parameters", "start", "vjp"]
