"""Convolution."""

from __future__ import annotations

import dataclasses
import functools

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv import depthwise as depthwise
from onnxtrain.autodiff.rules.conv.channel_scale import rescaled, scale_apart
from onnxtrain.autodiff.rules.conv.columns import input_by_columns
from onnxtrain.autodiff.rules.conv.weight_grad import weight_gradient
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, pick
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size
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
    dy, scaled, gain = scale_apart(op, dy, w)
    db = None if b is None else rescaled(op, op.ReduceSum(dy, [0, *win.axes], keepdims=0), gain)
    fixed = fixed_padding(op, x, y, win, auto_pad)
    if fixed is not None:
        dx = input_gradient(op, dy, scaled, x, fixed, group)
        return dx, rescaled(op, weight_gradient(op, x, dy, w, fixed, group), gain), db
    before, after = same_pads(op, x, y, win, upper=auto_pad == "SAME_UPPER")
    padded = pad_at_run_time(op, x, before, after)
    dx = crop_like(op, input_gradient(op, dy, scaled, padded, win, group), before, x)
    return dx, rescaled(op, weight_gradient(op, padded, dy, w, win, group), gain), db


def input_gradient(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int = 1
) -> ir.Value:
    """Return the gradient of a convolution's input ``x``."""
    name = choose_input(op.target, facts_of(op, x, dy, w, win, group))
    return INPUT_FORMS[name].build(op, dy, w, x, win, group)


def input_by_transposed_conv(
    op: OpBuilder,
    dy: ir.Value,
    w: ir.Value,
    x: ir.Value,
    win: Windows,
    group: int,
    *,
    symmetric: bool = False,
) -> ir.Value:
    """A transposed convolution of ``dy`` with W.

    Windows may leave out the last positions of the input, or reach beyond its padding (ceil_mode):
    the result is padded or cut to the size of ``x``, at run time where sizes are not known before.
    With ``symmetric``, both ends are padded alike.
    """
    parts = [_transposed_axis(op, dy, x, win, i, symmetric=symmetric) for i in range(win.rank)]
    extra = [p.extra for p in parts]
    dx = op.ConvTranspose(
        dy,
        w,
        dilations=win.dilations,
        group=group,
        output_padding=extra if any(extra) else None,
        pads=[*(p.before for p in parts), *(p.after for p in parts)],
        strides=win.strides,
    )
    cut = [(2 + i, p.skipped) for i, p in enumerate(parts) if p.cut]
    if cut:
        ends = op.vector([_plus(op, op.size(x, a), skipped) for a, skipped in cut])
        dx = op.Slice(dx, [skipped for _, skipped in cut], ends, [a for a, _ in cut])
    return dx


def input_by_turned_conv(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """A convolution of ``dy`` with W flipped, input and output channels exchanged, for stride 1."""
    turned = op.Transpose(w, perm=[1, 0, *win.axes])
    return depthwise.input_by_flipped_conv(op, dy, turned, x, win, group)


def input_in_float32(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """The transposed convolution, of bfloat16 with casts around it."""
    wide = ir.DataType.FLOAT if x.dtype == ir.DataType.BFLOAT16 else x.dtype
    dy_wide, w_wide, x_wide = (op.cast(v, wide) for v in (dy, w, x))
    dx = input_by_transposed_conv(op, dy_wide, w_wide, x_wide, win, group, symmetric=True)
    return op.cast(dx, x.dtype)


@dataclasses.dataclass(frozen=True)
class _TransposedAxis:
    """How a transposed convolution covers one axis of the input."""

    before: int
    after: int
    extra: int
    """``output_padding``."""
    skipped: int = 0
    """Positions in front of the input that are computed too."""
    cut: bool = False
    """Whether the result is longer than the input."""


def _transposed_axis(
    op: OpBuilder, dy: ir.Value, x: ir.Value, win: Windows, i: int, *, symmetric: bool
) -> _TransposedAxis:
    """Return pads so that the result is the input's size; if symmetric, it may have to be cut.

    ``beyond`` is how far the last window reaches beyond the input; negative where windows leave
    out its last positions. Unknown sizes get the longest input that so many windows can have.
    """
    size, count = op.dims(x)[2 + i], op.dims(dy)[2 + i]
    stride, extent, before = win.strides[i], win.extent(i), win.before[i]
    if isinstance(size, int) and isinstance(count, int) and extent is not None:
        beyond, known = stride * (count - 1) + extent - before - size, True
    elif stride == 1:
        beyond, known = win.after[i], True
    else:
        beyond, known = win.after[i] + 1 - stride if symmetric else 1 - stride, False
    if not symmetric:
        return _TransposedAxis(before, max(beyond, 0), max(-beyond, 0), cut=not known)
    if 0 <= before - beyond < stride:
        return _TransposedAxis(before, before, before - beyond, cut=not known)
    both = min(before, max(beyond, 0))
    extra = max(both - beyond, 0)
    longer = before + beyond - 2 * both + extra > 0
    return _TransposedAxis(both, both, extra, before - both, cut=longer or not known)


def _plus(op: OpBuilder, size: Size, count: int) -> Size:
    if isinstance(size, int):
        return size + count
    return op.Add(size, op.const([count])) if count else size


def _few_positions(facts: ConvShape) -> bool:
    wide = facts.outs is not None and facts.outs >= T.WIDE_OUTPUT_CHANNELS
    return facts.positions_up_to(
        T.INPUT_COLUMNS_POSITIONS_WIDE if wide else T.INPUT_COLUMNS_POSITIONS
    )


INPUT_FORMS: Forms[ConvShape] = {
    "transposed": Form(input_by_transposed_conv),
    "symmetric": Form(functools.partial(input_by_transposed_conv, symmetric=True)),
    "columns": Form(input_by_columns, lambda f: f.addable),
    "pairs": Form(depthwise.input_by_pairs, lambda f: f.depthwise and f.pairs is not None),
    "flipped": Form(
        depthwise.input_by_flipped_conv,
        lambda f: f.depthwise and not f.strided and not f.overpadded,
    ),
    "turned": Form(
        input_by_turned_conv, lambda f: f.one_group and not f.strided and not f.overpadded
    ),
    "float32": Form(input_in_float32),
}

_NARROW: list[Choice[ConvShape]] = [
    Choice("turned", lambda f: f.bfloat16, lacks="ConvTranspose.bfloat16"),
    Choice("float32", lambda f: f.bfloat16, lacks="ConvTranspose.bfloat16"),
]
_TRANSPOSED: list[Choice[ConvShape]] = [
    Choice("symmetric", lacks="ConvTranspose.asymmetric_pads"),
    Choice("transposed"),
]
_DEPTHWISE: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.INPUT_PAIRS)),
    Choice("flipped"),
    *_TRANSPOSED,
]
INPUT_CHOICES: dict[str, Choices[ConvShape]] = {  # by family of targets
    "cpu": [Choice("columns", _few_positions), *_DEPTHWISE],
    "wasm": _DEPTHWISE,
    "cuda": [Choice("flipped"), *_NARROW, *_TRANSPOSED],
}


def choose_input(target: Target, facts: ConvShape) -> str:
    """Name the form for a target."""
    return pick(target, facts, INPUT_FORMS, INPUT_CHOICES.get(target.family, _TRANSPOSED))
