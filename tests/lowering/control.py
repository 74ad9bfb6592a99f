"""Cases of control flow, inactive dropout, and nodes with constant inputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .make import c, f, w
from .single import Case

_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def _branch(op_type: str, name: str):
    """Return a function that builds a branch of one operator."""

    def build() -> ir.Graph:
        x = ir.val("inner", _FLOAT, [2, 3])
        start = ir.node("Constant", [], {"value": ir.tensor(_TABLE, name="t")}, outputs=[x])
        node = ir.node(op_type, [x], outputs=[ir.val(f"{name}_y", _FLOAT, [2, 3])])
        return ir.Graph([], node.outputs, nodes=[start, node], name=name)

    return build


_TABLE = np.asarray([[-1, 2, -3], [4, np.inf, 6]], np.float32)


def _scan_body() -> ir.Graph:
    """Return a body (state, x) -> (state + x, 2 state)."""
    state, x = ir.val("s", _FLOAT, [3]), ir.val("x", _FLOAT, [3])
    total = ir.node("Add", [state, x], outputs=[ir.val("t", _FLOAT, [3])])
    twice = ir.node("Add", [state, state], outputs=[ir.val("u", _FLOAT, [3])])
    return ir.Graph([state, x], [*total.outputs, *twice.outputs], nodes=[total, twice], name="scan")


def _loop_body() -> ir.Graph:
    """Return a body (i, c, state) -> (c, 2 state, state)."""
    i, go, state = ir.val("i", _INT64, []), ir.val("c", _BOOL, []), ir.val("s", _FLOAT, [3])
    flag = ir.node("Identity", [go], outputs=[ir.val("on", _BOOL, [])])
    twice = ir.node("Add", [state, state], outputs=[ir.val("t", _FLOAT, [3])])
    copy = ir.node("Identity", [state], outputs=[ir.val("seen", _FLOAT, [3])])
    outputs = [*flag.outputs, *twice.outputs, *copy.outputs]
    return ir.Graph([i, go, state], outputs, nodes=[flag, twice, copy], name="loop")


def _while_body() -> ir.Graph:
    """Return a body (i, c, k, state) -> (k + 1 < 3, k + 1, 2 state)."""
    i, go = ir.val("i", _INT64, []), ir.val("c", _BOOL, [])
    k, state = ir.val("k", _INT64, []), ir.val("s", _FLOAT, [3])
    numbers = [ir.val(n, _INT64, []) for n in ("one", "three")]
    constants = [
        ir.node("Constant", [], {"value": ir.tensor(np.asarray(v, np.int64))}, outputs=[x])
        for x, v in zip(numbers, (1, 3), strict=True)
    ]
    more = ir.node("Add", [k, numbers[0]], outputs=[ir.val("k2", _INT64, [])])
    flag = ir.node("Less", [more.outputs[0], numbers[1]], outputs=[ir.val("on", _BOOL, [])])
    twice = ir.node("Add", [state, state], outputs=[ir.val("t", _FLOAT, [3])])
    outputs = [*flag.outputs, *more.outputs, *twice.outputs]
    return ir.Graph([i, go, k, state], outputs, nodes=[*constants, more, flag, twice], name="loop")


_BRANCHES = {"then_branch": _branch("Neg", "then"), "else_branch": _branch("Abs", "else")}

CONTROL = [
    Case("If", (np.asarray(True),), _BRANCHES, "true", dynamic=False),
    Case("If", (np.asarray(False),), _BRANCHES, "false", dynamic=False),
    Case(
        "Scan",
        (f(3), f(4, 3)),
        {"body": _scan_body, "num_scan_inputs": 1},
        outputs=2,
        dynamic=False,
    ),
    Case(
        "Scan",
        (f(3), f(3, 4)),
        {
            "body": _scan_body,
            "num_scan_inputs": 1,
            "scan_input_axes": [1],
            "scan_input_directions": [1],
            "scan_output_axes": [1],
            "scan_output_directions": [1],
        },
        "back",
        outputs=2,
        dynamic=False,
    ),
    Case(
        "Loop", (c(3), c(True, bool), f(3)), {"body": _loop_body}, "count", outputs=2, dynamic=False
    ),
    Case(
        "Loop",
        (None, c(True, bool), c(0), f(3)),
        {"body": _while_body},
        "while",
        outputs=2,
        dynamic=False,
    ),
    Case("Dropout", (f(2, 3), c(0.5, np.float32), c(False, bool)), outputs=2, dynamic=False),
    Case("Dropout", (f(2, 3),), {}, "plain"),
    Case("Range", (c(2), c(9), c(3)), id="known"),
    Case("Range", (c(0.5, np.float32), c(2, np.float32), c(0.25, np.float32)), id="floats"),
    Case(
        "Range",
        (c(1), np.asarray(5), c(1)),
        id="computed",
        dynamic=False,
        refused=(7,),
        refused_plain=(7,),
    ),
    Case("STFT", (f(1, 16), c(4), w(8)), dynamic=False),
    Case("STFT", (f(2, 20), c(5), None, c(10)), {"onesided": 0}, "plain", dynamic=False),
]
