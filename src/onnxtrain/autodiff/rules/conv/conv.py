"""Convolution."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv import depthwise as depthwise
from onnxtrain.autodiff.rules.conv.columns import input_by_columns
from onnxtrain.autodiff.rules.conv.weight_grad import weight_gradient
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, pick
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows.conv_shape import ConvShape, facts_of
from onnxtrain.graph.windows.geometry import (
    Windows,
    crop_like,
    fixed_padding,
    pad_at_run_time,
    same_pads,
    windows,
)
from onnxtrain.targets import Target


@vjp("Conv")
def conv(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None = None,
    *,
    y: ir.Value,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dX`` is the transposed convolution of ``dy`` with W; ``dW`` correlates X with ``dy``."""
    win = windows(
        kernel_shape or op.dims(w)[2:], strides, dilations, pads if auto_pad == "NOTSET" else None
    )
    db = None if b is None else op.ReduceSum(dy, [0, *win.axes], keepdims=0)
    fixed = fixed_padding(op, x, y, win, auto_pad)
    if fixed is not None:
        dx = input_gradient(op, dy, w, x, fixed, group)
        return dx, weight_gradient(op, x, dy, w, fixed, group), db
    before, after = same_pads(op, x, y, win, upper=auto_pad == "SAME_UPPER")
    padded = pad_at_run_time(op, x, before, after)
    dx = crop_like(op, input_gradient(op, dy, w, padded, win, group), before, x)
    return dx, weight_gradient(op, padded, dy, w, win, group), db


def input_gradient(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int = 1
) -> ir.Value:
    """Return the gradient of a convolution's input ``x``."""
    name = choose_input(op.target, facts_of(op, x, dy, w, win, group))
    return INPUT_FORMS[name].build(op, dy, w, x, win, group)


def input_by_transposed_conv(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """A transposed convolution of ``dy`` with W.

    Windows may leave out the last positions of the input, or reach beyond its padding (ceil_mode):
    the result is padded or cut to the size of ``x``, at run time where sizes are not known before.
    """
    after: list[int] = []
    extra: list[int] = []
    cut: list[int] = []
    for i, (size, count) in enumerate(zip(op.dims(x)[2:], op.dims(dy)[2:], strict=True)):
        stride, extent = win.strides[i], win.extent(i)
        if isinstance(size, int) and isinstance(count, int) and extent is not None:
            beyond = stride * (count - 1) + extent - win.before[i] - size
        elif stride == 1:
            beyond = win.after[i]
        else:
            beyond = 1 - stride
            cut.append(2 + i)
        after.append(max(beyond, 0))
        extra.append(max(-beyond, 0))
    dx = op.ConvTranspose(
        dy,
        w,
        dilations=win.dilations,
        group=group,
        output_padding=extra if any(extra) else None,
        pads=[*win.before, *after],
        strides=win.strides,
    )
    if cut:
        dx = op.Slice(dx, [0] * len(cut), op.vector([op.size(x, a) for a in cut]), cut)
    return dx


def _few_positions(facts: ConvShape) -> bool:
    wide = facts.outs is not None and facts.outs >= T.WIDE_OUTPUT_CHANNELS
    return facts.positions_up_to(
        T.INPUT_COLUMNS_POSITIONS_WIDE if wide else T.INPUT_COLUMNS_POSITIONS
    )


INPUT_FORMS: Forms[ConvShape] = {
    "transposed": Form(input_by_transposed_conv),
    "columns": Form(input_by_columns, lambda f: f.addable),
    "pairs": Form(depthwise.input_by_pairs, lambda f: f.depthwise and f.pairs is not None),
    "flipped": Form(
        depthwise.input_by_flipped_conv,
        lambda f: f.depthwise and not f.strided and not f.overpadded,
    ),
}

_TRANSPOSED: list[Choice[ConvShape]] = [Choice("transposed")]
_DEPTHWISE: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.INPUT_PAIRS)),
    Choice("flipped"),
    *_TRANSPOSED,
]
INPUT_CHOICES: dict[str, Choices[ConvShape]] = {  # by family of targets
    "cpu": [Choice("columns", _few_positions), *_DEPTHWISE],
    "wasm": _DEPTHWISE,
}


def choose_input(target: Target, facts: ConvShape) -> str:
    """Name the form for a target."""
    return pick(target, facts, INPUT_FORMS, INPUT_CHOICES.get(target.family, _TRANSPOSED))
