"""Convolution and transposed convolution.

``dX`` and ``dW`` are linear in each channel of ``dy``. Where ``dy = gain * z`` with one gain per
output channel, ``dX`` is the input gradient of ``z`` with the weight ``gain * W``, and ``dW`` is
``gain`` times the weight gradient of ``z``. The gradient of batch normalization ends with such a
scale, and weights are often much smaller than activations, so the scale moves to the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradients,
    Variant,
    Variants,
    select_variant,
    select_variant_name,
    vjp,
)
from onnxtrain.autodiff.rules import conv_weight as depthwise
from onnxtrain.autodiff.rules.conv_weight import input_by_columns, weight_gradient
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows import (
    ConvShape,
    Windows,
    conv_shape_of,
    crop_like,
    pad_dynamic,
    resolve_auto_pad,
    same_pads,
    window_geometry,
)
from onnxtrain.targets import Target


@vjp("ConvTranspose")
def conv_transpose(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None = None,
    *,
    node: ir.Node,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    output_padding: list[int] | None,
    output_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dX`` is the convolution of ``dy`` with W; ``dW`` correlates ``dy`` with X.

    The operator is the input gradient of a convolution whose input has the shape of y.
    """
    win = window_geometry(kernel_shape or op.dims(w)[2:], strides, dilations, None)
    extra = output_padding or [0] * win.rank
    db = None if b is None else op.ReduceSum(dy, [0, *win.axes], keepdims=0)
    upper = auto_pad == "SAME_UPPER"
    if output_shape:
        win, dy = _fit_output(op, dy, x, win, extra, output_shape, upper, node)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # y has stride times the size of x.
        extents = [_extent(win, i, node) for i in range(win.rank)]
        totals = [e + o - s for e, o, s in zip(extents, extra, win.strides, strict=True)]
        win = _padded(win, [max(t, 0) for t in totals], upper)
    elif auto_pad == "NOTSET":
        win = window_geometry(win.kernel, strides, dilations, pads)
    dx = op.Conv(dy, w, dilations=win.dilations, group=group, pads=win.pads, strides=win.strides)
    if any(o >= s for o, s in zip(extra, win.strides, strict=True)):
        ends = op.vector([op.size(x, a) for a in win.axes])
        dx = op.Slice(dx, [0] * win.rank, ends, win.axes)
    return dx, weight_gradient(op, dy, x, w, win, group), db


def _fit_output(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    win: Windows,
    extra: list[int],
    output_shape: list[int],
    upper: bool,
    node: ir.Node,
) -> tuple[Windows, ir.Value]:
    """Return the padding for ``output_shape``, or ``dy`` padded at run time."""
    wanted = output_shape[-win.rank :]
    rest = [extra[i] + _extent(win, i, node) - win.strides[i] - wanted[i] for i in range(win.rank)]
    sizes = D.static_sizes(op.dims(x)[2:])
    if sizes is not None:
        totals = [max(d * s + r, 0) for d, s, r in zip(sizes, win.strides, rest, strict=True)]
        return _padded(win, totals, upper), dy
    total = op.Add(op.Mul(op.Shape(x, start=2), list(win.strides)), rest)
    total = op.Max(total, op.const([0] * win.rank))
    half = op.Div(total, [2] * win.rank)
    larger = op.Sub(total, half)
    before, after = (half, larger) if upper else (larger, half)
    return win, pad_dynamic(op, dy, before, after)


def _padded(win: Windows, totals: list[int], upper: bool) -> Windows:
    small = tuple(t // 2 for t in totals)
    large = tuple(t - t // 2 for t in totals)
    before, after = (small, large) if upper else (large, small)
    return dataclasses.replace(win, before=before, after=after)


def _extent(win: Windows, i: int, node: ir.Node) -> int:
    extent = win.extent(i)
    if extent is None:
        raise UndifferentiableError(
            f"padding of node {node.name!r} requires a static kernel size: {S.describe(node)}\n"
            "hint: give the node its kernel_shape, or explicit pads"
        )
    return extent


SplitScale = tuple[ir.Value, ir.Value, ir.Value | None]


def split_channel_scale(op: OpBuilder, dy: ir.Value, w: ir.Value) -> SplitScale:
    """Return ``z``, the weight for ``dX``, and the gain, ``None`` if ``dy`` has no such factor."""
    return select_variant(op, Scaled(dy, w), SCALE_VARIANTS, SCALE_CHOICES)(op, dy, w)


def apply_channel_scale(op: OpBuilder, gradient: ir.Value, gain: ir.Value | None) -> ir.Value:
    """Multiply the gradient of a weight or bias by the gain."""
    if gain is None:
        return gradient
    fits = op.rank(gradient) == op.rank(gain)
    return op.Mul(gradient, gain if fits else op.Reshape(gain, [-1]))


class Scaled(NamedTuple):
    """A gradient and the weight it is convolved with."""

    dy: ir.Value
    w: ir.Value


def _gain(dy: ir.Value) -> ir.Value | None:
    """Return the factor that scales the channels of a gradient, ``[channels, 1, ...]``."""
    scale = dy.producer()
    if scale is None or not is_op(scale, "Mul"):
        return None
    gain, have = scale.inputs[1], D.static_sizes(S.dims_of(dy) or (None,))
    sizes = None if gain is None else D.static_sizes(S.dims_of(gain) or (None,))
    if have is None or sizes is None or len(have) < 3:
        return None
    return gain if list(sizes) == [have[1], *[1] * (len(have) - 2)] else None


def _larger_than_weight(v: Scaled) -> bool:
    if _gain(v.dy) is None:
        return False
    sizes, weight = (
        D.static_sizes(S.dims_of(v.dy) or (None,)),
        D.static_sizes(S.dims_of(v.w) or (None,)),
    )
    assert sizes is not None
    return weight is not None and math.prod(sizes) >= T.CHANNEL_SCALE_FOLD_RATIO * math.prod(weight)


def _in_weights(op: OpBuilder, dy: ir.Value, w: ir.Value) -> SplitScale:
    scale, gain = dy.producer(), _gain(dy)
    assert scale is not None
    assert gain is not None
    z = scale.inputs[0]
    assert z is not None
    of_outputs = op.Reshape(gain, [-1, *[1] * (op.rank(w) - 1)])
    return z, op.Mul(w, of_outputs), of_outputs


def _unchanged(op: OpBuilder, dy: ir.Value, w: ir.Value) -> SplitScale:
    return dy, w, None


SCALE_VARIANTS: Variants[Scaled] = {
    "in weights": Variant(_in_weights, _larger_than_weight),
    "as it is": Variant(_unchanged),
}
SCALE_CHOICES: Choices[Scaled] = [
    Choice("in weights", prefers="fold-channel-scale"),
    Choice("as it is"),
]


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
    win = window_geometry(
        kernel_shape or op.dims(w)[2:], strides, dilations, pads if auto_pad == "NOTSET" else None
    )
    dy, scaled, gain = split_channel_scale(op, dy, w)
    db = (
        None
        if b is None
        else apply_channel_scale(op, op.ReduceSum(dy, [0, *win.axes], keepdims=0), gain)
    )
    fixed = resolve_auto_pad(op, x, y, win, auto_pad)
    if fixed is not None:
        dx = input_gradient(op, dy, scaled, x, fixed, group)
        return dx, apply_channel_scale(op, weight_gradient(op, x, dy, w, fixed, group), gain), db
    before, after = same_pads(op, x, y, win, upper=auto_pad == "SAME_UPPER")
    padded = pad_dynamic(op, x, before, after)
    dx = crop_like(op, input_gradient(op, dy, scaled, padded, win, group), before, x)
    return dx, apply_channel_scale(op, weight_gradient(op, padded, dy, w, win, group), gain), db


def input_gradient(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int = 1
) -> ir.Value:
    """Return the gradient of a convolution's input ``x``."""
    name = choose_input(op.target, conv_shape_of(op, x, dy, w, win, group))
    return INPUT_GRAD_VARIANTS[name].build(op, dy, w, x, win, group)


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

    Windows may skip the last positions of the input or exceed its padding (ceil_mode). The result
    is padded or sliced to the size of ``x``, at run time if sizes are dynamic. With ``symmetric``,
    both ends have the same padding.
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


def input_by_full_conv(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """A convolution of ``dy`` with W flipped, input and output channels exchanged, for stride 1."""
    turned = op.Transpose(w, perm=[1, 0, *win.axes])
    return depthwise.input_by_flipped_conv(op, dy, turned, x, win, group)


def input_in_float32(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """ConvTranspose, with casts to float32 around it for bfloat16."""
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
    """Extra positions computed before the input."""
    cut: bool = False
    """Whether the result is longer than the input."""


def _transposed_axis(
    op: OpBuilder, dy: ir.Value, x: ir.Value, win: Windows, i: int, *, symmetric: bool
) -> _TransposedAxis:
    """Return pads for which the result has the input's size; symmetric pads may require a slice.

    ``beyond`` is how far the last window exceeds the input, negative if windows skip its last
    positions. For dynamic sizes, assume the longest input with this number of windows.
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
        T.COL2IM_INPUT_GRAD_POSITIONS_WIDE if wide else T.COL2IM_INPUT_GRAD_POSITIONS
    )


INPUT_GRAD_VARIANTS: Variants[ConvShape] = {
    "transposed": Variant(input_by_transposed_conv),
    "symmetric": Variant(functools.partial(input_by_transposed_conv, symmetric=True)),
    "columns": Variant(input_by_columns, lambda f: f.can_use_col2im),
    "pairs": Variant(depthwise.input_by_pairs, lambda f: f.depthwise and f.pairs is not None),
    "flipped": Variant(
        depthwise.input_by_flipped_conv,
        lambda f: f.depthwise and not f.strided and not f.overpadded,
    ),
    "turned": Variant(
        input_by_full_conv, lambda f: f.one_group and not f.strided and not f.overpadded
    ),
    "float32": Variant(input_in_float32),
}

_BFLOAT16: list[Choice[ConvShape]] = [
    Choice("turned", lambda f: f.bfloat16, lacks="ConvTranspose.bfloat16"),
    Choice("float32", lambda f: f.bfloat16, lacks="ConvTranspose.bfloat16"),
]
_TRANSPOSED: list[Choice[ConvShape]] = [
    Choice("symmetric", lacks="ConvTranspose.asymmetric_pads"),
    Choice("transposed"),
]
_DEPTHWISE: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.DEPTHWISE_INPUT_GRAD_PAIRS)),
    Choice("flipped"),
    *_TRANSPOSED,
]
INPUT_GRAD_CHOICES: dict[str, Choices[ConvShape]] = {  # by family of targets
    "cpu": [Choice("columns", _few_positions), *_DEPTHWISE],
    "wasm": _DEPTHWISE,
    "cuda": [Choice("flipped"), *_BFLOAT16, *_TRANSPOSED],
}


def choose_input(target: Target, facts: ConvShape) -> str:
    """Return the name of the variant for a target."""
    return select_variant_name(
        target, facts, INPUT_GRAD_VARIANTS, INPUT_GRAD_CHOICES.get(target.family, _TRANSPOSED)
    )
