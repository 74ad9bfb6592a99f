"""Models that compute gradients: ``vjp``, ``grad`` and ``jvp``.

``load_normalized`` brings a model to the normal form that the gradient rules know.
``GradientModel`` appends a reverse sweep. It is the only place that does, so every caller gets the
same order: passes on the forward graph, parameters lifted to inputs, the sweep, passes after it,
final passes, and a checked ModelProto.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff import (
    gradient_nodes,
    rules,  # noqa: F401 - fills the registry
)
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
from onnxtrain.importer import Prepared, mark_constants, prepare
from onnxtrain.optimize.pipeline import rewrite_after, rewrite_before, rewrite_final
from onnxtrain.targets import Target, find


class GradientModel:
    """A model in the normal form, to which gradients are added in place.

    Args:
        prepared: the model; its graph is changed in place.
        target: the runtime to generate operators for.
        blocks: whether the backward pass will recompute some blocks.
    """

    def __init__(
        self, prepared: Prepared, target: str | Target = "cpu", *, blocks: bool = False
    ) -> None:
        target = prepared.restrict(target)
        mark_constants(prepared.model, prepared.constants)  # passes may merge and fold them
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
            cotangents: incoming gradients of some values of the graph.
            wrt: values to differentiate with respect to.
            recompute: blocks to recompute; see :func:`onnxtrain.build`.
            batch: inputs that change from step to step.
        """
        return differentiate_with_recompute(
            self.op, cotangents, wrt, recompute=recompute, batch=batch
        )

    def lift(self, values: Sequence[ir.Value]) -> None:
        """Turn initializers among ``values`` into inputs without defaults, in order."""
        lift(self.graph, values)

    def input_like(self, name: str, ref: ir.Value) -> ir.Value:
        """Add an input with the type of ``ref``; a name in use gets ``.2``, ``.3`` ..."""
        value = ir.Value(name=self._unused(name), type=ref.type, shape=ref.shape)
        self.graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value | None, ref: ir.Value) -> None:
        """Add an output with the type of ``ref``; ``None`` means zeros."""
        value = self.op.zeros_like(ref) if value is None else value
        # `value` may be an input, or an output already; an output needs its own node and name.
        out = self.op.Identity(value)
        out.name, out.type, out.shape = self._unused(name), ref.type, ref.shape
        self.graph.outputs.append(out)

    def set_outputs(self, values: Sequence[ir.Value]) -> None:
        """Replace the outputs of the graph, each by a separate value."""
        self.graph.outputs.clear()
        for value in values:
            out = self.op.Identity(value)  # one value may be two outputs
            out.type, out.shape = value.type, value.shape
            self.graph.outputs.append(out)

    def rewrite(self) -> None:
        """Run the passes that follow the sweep; the graph must have its outputs."""
        rewrite_after(self.model, self.op)

    def finish(self) -> onnx.ModelProto:
        """Run the remaining passes; return the checked model."""
        self.rewrite()
        return finalize(rewrite_final(self.model, self.op.target))

    def _unused(self, name: str) -> str:
        unused, n = name, 2
        while unused in self.op.names.taken:
            unused, n = f"{name}.{n}", n + 1
        self.op.names.taken.add(unused)
        return unused


def lift(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Turn initializers among ``values`` into inputs without defaults, in order."""
    for x in values:
        if x.is_graph_input():
            continue
        graph.initializers.pop(x.name or "", None)  # unused ones were removed from the graph
        x.const_value = None
        graph.inputs.append(x)


def load_normalized(
    model: Source, target: str | Target = "cpu", *, straight_through: bool = False
) -> Prepared:
    """Load a model and return it in the normal form; the argument is not changed.

    Operators without a rule are replaced by the function body of the ONNX standard, if it has one.
    MatMulNBits stays if the target has it.

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
    connected = gradient_nodes.connect(model) if gradient_nodes.present(model) else None
    prepared = prepare(
        model if connected is None else connected.model,
        inline=inline,
        keep=keep,
        straight_through=straight_through,
        weights_exposed=weights_exposed,
    )
    if connected is not None:
        prepared = gradient_nodes.expand(prepared, connected)
    if straight_through:
        mark_straight_through(prepared.graph.all_nodes())
    return prepared


def registered_domains() -> set[str]:
    """Return the domains of rules that the user registered."""
    return {key.split("::")[0] for key in USER_RULES if "::" in key}


def keep_predicate(target: str | Target) -> Callable[[ir.Node], bool]:
    """Return a predicate: whether a node of another domain has a rule and is not decomposed."""
    fused = not find(target).lacks("MatMulNBits")

    def keep(node: ir.Node) -> bool:
        key = op_key(node)
        if key in USER_RULES:
            return "::" in key
        return fused and key in KEEP_UNEXPANDED and KEEP_UNEXPANDED[key](node)

    return keep


def lacks_rule(op_type: str) -> bool:
    """Return whether a standard operator has neither a rule nor a declared zero gradient."""
    return not any(op_type in table for table in (USER_RULES, RULES, ZERO_GRADIENT, NO_GRADIENT))


Names = str | Sequence[str] | None


def vjp(
    model: Source, wrt: Names = None, outputs: Names = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes vector-Jacobian products in addition to its outputs.

    Inputs: those of the model, the parameters in ``wrt`` order (without defaults), and
    ``<output>_grad`` for each selected output. Outputs: those of the model, and ``<name>_grad`` for
    each ``wrt``. A name in use gets ``.2``, ``.3`` ...; rely on the order.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: names or glob patterns of initializers and inputs. By default, every parameter: no
            constants, no running statistics.
        outputs: outputs that get a cotangent. By default, every float output.
        target: the runtime to generate operators for: ``cpu``, ``cuda``, ``wasm``, ``webgpu`` or
            ``portable``.

    Raises:
        UndifferentiableError: some nodes on the path have no gradient; the message lists them all.
        PrepareError: a name does not exist; the message lists near matches.
    """
    work, wrt_values, selected = prepare_gradients(model, wrt, outputs, target)
    gradient_model = GradientModel(work, target)
    gradient_model.lift(wrt_values)
    cotangents = {y: gradient_model.input_like(f"{y.name}_grad", y) for y in selected}
    grads = gradient_model.differentiate(cotangents, wrt_values)
    for x in wrt_values:
        gradient_model.output(f"{x.name}_grad", grads[x], x)
    return gradient_model.finish()


def grad(
    model: Source, wrt: Names = None, of: str | None = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes the gradient of a scalar output in addition to its outputs.

    Same as :func:`vjp`, without cotangent inputs.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        wrt: as in :func:`vjp`.
        of: an output with one element, of shape [] or [1]. By default, the only output or the one
            named ``loss``.
        target: as in :func:`vjp`.
    """
    work, wrt_values, selected = prepare_gradients(model, wrt, of, target, select_scalar_output)
    (loss,) = selected
    if S.dims_of(loss) not in ((), (1,)):
        raise UndifferentiableError(
            f"grad requires an output with one element, got {S.describe_value(loss)}\n"
            "hint: reduce it in the model, or use onnxtrain.vjp with a cotangent"
        )
    gradient_model = GradientModel(work, target)
    gradient_model.lift(wrt_values)
    seed = gradient_model.op.const(1.0 if S.dims_of(loss) == () else [1.0], loss.dtype)
    grads = gradient_model.differentiate({loss: seed}, wrt_values)
    for x in wrt_values:
        gradient_model.output(f"{x.name}_grad", grads[x], x)
    return gradient_model.finish()


def jvp(
    model: Source, wrt: Names = None, outputs: Names = None, *, target: str | Target = "cpu"
) -> onnx.ModelProto:
    """Return a model that computes Jacobian-vector products in addition to its outputs.

    Inputs: those of the model, the parameters in ``wrt`` order, and ``<name>_tangent`` for each
    ``wrt``. Outputs: those of the model, and ``<output>_tangent`` for each selected output.
    """
    work, wrt_values, selected = prepare_gradients(model, wrt, outputs, target)
    gradient_model = GradientModel(work, target)
    gradient_model.lift(wrt_values)
    tangents = {x: gradient_model.input_like(f"{x.name}_tangent", x) for x in wrt_values}
    output_tangents = push_forward(gradient_model, tangents, selected)
    for y in selected:
        gradient_model.output(f"{y.name}_tangent", output_tangents[y], y)
    gradient_model.graph.sort()
    return gradient_model.finish()


def push_forward(
    gradient_model: GradientModel,
    tangents: Mapping[ir.Value, ir.Value],
    outputs: Sequence[ir.Value],
) -> dict[ir.Value, ir.Value | None]:
    """Append the tangents of outputs, given those of inputs; ``None`` if a tangent is zero."""
    op, graph = gradient_model.op, gradient_model.graph
    # v -> J v is the transpose of u -> J^T u. The latter is linear in u, so its transpose does
    # not read u: the probes below are replaced by zeros in the end.
    probes = {y: gradient_model.input_like(f"{y.name}_probe", y) for y in outputs}
    grads = gradient_model.differentiate(probes, list(tangents))
    pullback_cotangents: dict[ir.Value, ir.Value] = {}
    for x, g in grads.items():
        if g is not None:
            pullback_cotangents[g] = (
                op.Add(pullback_cotangents[g], tangents[x])
                if g in pullback_cotangents
                else tangents[x]
            )
    found = gradient_model.differentiate(pullback_cotangents, list(probes.values()))
    for y, probe in probes.items():
        probe.replace_all_uses_with(op.zeros_like(y))
        graph.inputs.remove(probe)
    graph.sort()
    return {y: found.get(probe) for y, probe in probes.items()}


def expand_gradients(model: Source, *, target: str | Target = "cpu") -> onnx.ModelProto:
    """Return the model with its training operators replaced by standard operators.

    ``Gradient`` nodes of the domain ``ai.onnx.preview.training`` become the derivative that they
    stand for, also of each other; ``Adam``, ``Adagrad`` and ``Momentum`` become their update rule.
    Inputs and outputs stay as they are. All other functions of this library do the same when they
    load such a model.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; it is not changed.
        target: as in :func:`vjp`.

    Raises:
        UndifferentiableError: a function has no derivative; the message names its node.
    """
    return GradientModel(load_normalized(model, target), target).finish()


def parameters(model: Source, wrt: Names = None) -> dict[str, np.ndarray]:
    """Return the arrays of the initializers in ``wrt``, in the order of :func:`vjp`'s inputs.

    Inputs of the model in ``wrt`` have no array and are skipped.
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
    """Return the model in the normal form, the values of ``wrt`` and the selected outputs."""
    work = load_normalized(model, find(target))
    selected = choose(work, outputs)
    wrt_values = select_wrt(work, wrt)
    if wrt is not None:
        _reject_settings(wrt_values)
    if not wrt_values:
        raise UndifferentiableError(
            "the model has no trainable parameters: no weight reaches a float output\n"
            "hint: name inputs or initializers in `wrt`"
        )
    return work, wrt_values, selected


def _reject_settings(wrt: Sequence[ir.Value]) -> None:
    """Reject inputs such as axes and sizes: a zero gradient for them would be wrong."""
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


def select_scalar_output(prepared: Prepared, of: Names) -> list[ir.Value]:
    """Return the output ``of``; by default the only one, or ``loss``."""
    names = [y.name or "" for y in prepared.graph.outputs]
    if of is None:
        of = names[0] if len(names) == 1 else "loss" if "loss" in names else None
    outputs = [] if of is None else select_outputs(prepared, of, "of")
    if len(outputs) != 1:
        choice = [y.name for y in outputs] or names
        raise PrepareError(
            f"found several outputs: {', '.join(map(str, choice))}\n"
            f"hint: select one, for example of={choice[0]!r}"
        )
    return outputs
