"""What exporters put behind attention's softmax: ``Where(IsNaN(p), 0, p)``."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op


@dataclasses.dataclass(frozen=True)
class NanGuard:
    """The nodes that put zeros in the place of NaN."""

    test: ir.Node
    guard: ir.Node


def nan_guard(p: ir.Value) -> NanGuard | None:
    """Return the guard that is all that reads a value, if there is one."""
    uses = list(p.uses())
    tests = [use.node for use in uses if is_op(use.node, "IsNaN")]
    guards = [use.node for use in uses if is_op(use.node, "Where") and use.idx == 2]
    if p.is_graph_output() or len(uses) != 2 or len(tests) != 1 or len(guards) != 1:
        return None
    (test,), (guard,) = tests, guards
    zero = None if guard.inputs[1] is None else ir.convenience.get_const_tensor(guard.inputs[1])
    if guard.inputs[0] is not test.outputs[0] or zero is None or np.any(zero.numpy()):
        return None
    return NanGuard(test, guard) if zero.size == 1 else None


__all__ = ["NanGuard", "nan_guard"]
