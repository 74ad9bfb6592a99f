"""A model and its gradients: the one place where a reverse sweep is added to a model.

In order: passes on the forward graph, parameters lifted to inputs, the sweep, passes behind it,
final passes, and a checked ModelProto. Everything that makes gradients goes through here, so that
one graph gets the same treatment whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.autodiff import rules  # noqa: F401 - fills the registry
from onnxtrain.autodiff.recompute import differentiate_again
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.finish import finish
from onnxtrain.passes.pipeline import rewrite_after, rewrite_before, rewrite_final
from onnxtrain.targets import Target


class GradientModel:
    """A model in the normal form, to which gradients are added in place.

    Args:
        model: in the normal form; it is used up.
        target: what forms are chosen for.
        blocks: whether some blocks will be computed again in the backward pass.
    """

    def __init__(
        self, model: ir.Model, target: str | Target = "cpu", *, blocks: bool = False
    ) -> None:
        rewrite_before(model, target, blocks=blocks)
        self.model, self.graph = model, model.graph
        self.op = OpBuilder(model.graph, "grad/", target=target)

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
        return differentiate_again(self.op, cotangents, wrt, recompute=recompute, batch=batch)

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
        return finish(rewrite_final(self.model, self.op.target))

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


__all__ = ["GradientModel", "lift"]
