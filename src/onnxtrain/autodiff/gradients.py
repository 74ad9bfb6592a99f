"""Models that compute gradients, from models that compute values.

A model and its gradients: the one place where a reverse sweep is added to a model.

In order: passes on the forward graph, parameters lifted to inputs, the sweep, passes behind it,
final passes, and a checked ModelProto. Everything that makes gradients goes through here, so that
one graph gets the same treatment whoever asks for it.

From anything that is a model to the normal form that the rules know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.recompute import differentiate_with_recompute
from onnxtrain.autodiff.rule_registry import (
    KEEP_UNEXPANDED,
    NO_GRADIENT,
    RULES,
    STRAIGHT_THROUGH_RULES,
    USER_RULES,
    ZERO_GRADIENT,
    find_rule,
    mark_straight_through,
)
from onnxtrain.autodiff.selection import select_outputs, select_wrt
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import Source, load
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.nodes import op_key
from onnxtrain.importer import Prepared, prepare
from onnxtrain.optimize.pipeline import rewrite_after, rewrite_before, rewrite_final
from onnxtrain.targets import Target, find


class GradientModel:
    """A model in the normal form, to which gradients are added in place.

    Args:
        prepared: the model; its graph is changed in place.
        target: the runtime to generate operators for.
        blocks: whether some blocks will be computed again in the backward pass.
    """

    def __init__(
        self, prepared: Prepared, target: str | Target = "cpu", *, blocks: bool = False
    ) -> None:
        target = prepared.restrict(target)
        rewrite_before(prepared.model, target, blocks=blocks)
        self.model, self.graph = prepared.model, prepared.graph
        self.op = OpBuilder(self.graph, "grad/", target=target)

    def differentiate(
        self,
        cotangents: Mapping[ir.Value, ir.Value],
        wrt: Sequence[ir.Value],
        *,
        recompute: str | Sequence[str] = (),
        batch: Sequence[ir.Value] = (),
    ) -> dict[ir.Value, ir.Value | None]:
        """Append the reverse sweep; return the gradient of each ``wrt``, ``None`` if it is zero.

        Args:
            cotangents: gradients of some values of the graph.
            wrt: values whose gradient is wanted.
            recompute: which blocks to compute again; see :func:`onnxtrain.build`.
            batch: inputs that change from step to step.
        """
        return differentiate_with_recompute(
            self.op, cotangents, wrt, recompute=recompute, batch=batch
        )

    def lift(self, values: Sequence[ir.Value]) -> None:
        """Turn initializers among ``values`` into inputs without defaults, in order."""
        lift(self.graph, values)

    def input_like(self, wanted: str, ref: ir.Value) -> ir.Value:
        """Add an input of the type of ``ref``; a name that is taken gets ``.2``, ``.3`` ...."""
        value = ir.Value(name=self._free(wanted), type=ref.type, shape=ref.shape)
        self.graph.inputs.append(value)
        return value

    def output(self, wanted: str, value: ir.Value | None, ref: ir.Value) -> None:
        """Add an output of the type of ``ref``; ``None`` stands for zeros."""
        value = self.op.zeros_like(ref) if value is None else value
        # An output needs a node and a name of its own.
        out = self.op.Identity(value)
        out.name, out.type, out.shape = self._free(wanted), ref.type, ref.shape
        self.graph.outputs.append(out)

    def set_outputs(self, values: Sequence[ir.Value]) -> None:
        """Let the graph have these outputs and no others, each a value of its own."""
        self.graph.outputs.clear()
        for value in values:
            out = self.op.Identity(value)  # one value may serve twice
            out.type, out.shape = value.type, value.shape
            self.graph.outputs.append(out)

    def rewrite(self) -> None:
        """Run the passes behind the sweep; the outputs must be there."""
        rewrite_after(self.model, self.op)

    def finish(self) -> onnx.ModelProto:
        """Run all passes that are left; return the checked model."""
        self.rewrite()
        return finalize(rewrite_final(self.model, self.op.target))

    def _free(self, wanted: str) -> str:
        name, n = wanted, 2
        while name in self.op.names.taken:
            name, n = f"{wanted}.{n}", n + 1
        self.op.names.taken.add(name)
        return name


def lift(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Turn initializers among ``values`` into inputs without defaults, in order."""
    for x in values:
        if x.is_graph_input():
            continue
        graph.initializers.pop(x.name or "", None)  # one that nothing reads is not there
        x.const_value = None
        graph.inputs.append(x)


def load_normalized(
    model: Source, target: str | Target = "cpu", *, straight_through: bool = False
) -> Prepared:
    """Load a model and return it in the normal form; the argument is not changed.

    Operators without a rule whose body the ONNX standard gives are replaced by it. Products with
    packed weights stay what they are if the target has them.

    Args:
        model: anything that ``load`` takes.
        target: the runtime to generate operators for.
        straight_through: whether gradients pass quantizers inside their range.
    """
    loaded = load(model, allow_domains=registered_domains())
    return normalize(loaded, target, straight_through=straight_through)


def normalize(
    model: ir.Model,
    target: str | Target = "cpu",
    *,
    straight_through: bool = False,
    weights_exposed: bool = False,
) -> Prepared:
    """Return a model from ``load`` in the normal form; the argument must not be used any more.

    Does what :func:`load_normalized` does, without loading. ``weights_exposed`` says that
    ``expose_weights`` was called on the model.
    """

    def inline(op_type: str) -> bool:
        return lacks_rule(op_type) and not (straight_through and op_type in STRAIGHT_THROUGH_RULES)

    keep = keep_predicate(target)
    prepared = prepare(
        model,
        inline=inline,
        keep=keep,
        straight_through=straight_through,
        weights_exposed=weights_exposed,
    )
    if straight_through:
        mark_straight_through(prepared.graph.all_nodes())
    return prepared


def registered_domains() -> set[str]:
    """Return the domains for which the user registered rules."""
    return {key.split("::")[0] for key in USER_RULES if "::" in key}


def keep_predicate(target: str | Target) -> Callable[[ir.Node], bool]:
    """Return what tells of a node of another domain whether it has a rule and stays as it is."""
    fused = not find(target).lacks("MatMulNBits")

    def keep(node: ir.Node) -> bool:
        key = op_key(node)
        if key in USER_RULES:
            return "::" in key
        return fused and key in KEEP_UNEXPANDED and KEEP_UNEXPANDED[key](node)

    return keep


def lacks_rule(op_type: str) -> bool:
    """Return whether nothing is registered for a standard operator."""
    return not any(op_type in table for table in (USER_RULES, RULES, ZERO_GRADIENT, NO_GRADIENT))


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
    work, wrt_values, chosen = prepare_gradients(model, wrt, outputs, target)
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
    work, wrt_values, chosen = prepare_gradients(model, wrt, of, target, _select_scalar_output)
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
    work, wrt_values, chosen = prepare_gradients(model, wrt, outputs, target)
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


def prepare_gradients(
    model: Source,
    wrt: Names,
    outputs: Names,
    target: str | Target,
    choose: Callable[[Prepared, Names], list[ir.Value]] = select_outputs,
) -> tuple[Prepared, list[ir.Value], list[ir.Value]]:
    """Return the model in the normal form, the values of ``wrt`` and the chosen outputs."""
    work = load_normalized(model, find(target))
    chosen = choose(work, outputs)
    wrt_values = select_wrt(work, wrt)
    if wrt is not None:
        _reject_settings(wrt_values)
    if not wrt_values:
        raise UndifferentiableError(
            "the model has no trainable parameters: no weight reaches a float output\n"
            "hint: name inputs or initializers in `wrt`"
        )
    return work, wrt_values, chosen


def _reject_settings(wrt: Sequence[ir.Value]) -> None:
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


def _select_scalar_output(prepared: Prepared, of: Names) -> list[ir.Value]:
    """Return the output that ``of`` names; ``None`` stands for the only one, or for ``loss``."""
    names = [y.name or "" for y in prepared.graph.outputs]
    if of is None:
        of = names[0] if len(names) == 1 else "loss" if "loss" in names else None
    outputs = [] if of is None else select_outputs(prepared, of, "of")
    if len(outputs) != 1:
        choice = [y.name for y in outputs] or names
        raise PrepareError(
            f"which output? the model has {', '.join(map(str, choice))}\n"
            f"hint: pass of={choice[0]!r}, say"
        )
    return outputs
