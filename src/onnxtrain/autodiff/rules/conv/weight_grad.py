"""The weight gradient of a convolution, in several forms.

``dW[o, c, t] = sum over n and p of x[n, c, p * stride - before + t * dilation] * dy[n, o, p]``, for
output channel o, input channel c, tap t, batch n and position p.

All forms give the same numbers; runtimes differ by factors in how fast they are at each of them.
``CHOICES`` says which one goes where, first match first.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules.conv import depthwise as depthwise
from onnxtrain.autodiff.rules.conv.columns import (
    weight_by_columns,
    weight_by_group_columns,
    weight_by_shifts,
    weight_by_signal_columns,
    weight_by_tap_columns,
)
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, pick
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows.columns import by_product, channels_second, fits
from onnxtrain.graph.windows.conv_shape import ConvShape, facts_of
from onnxtrain.graph.windows.geometry import Windows, pad, tap_slices
from onnxtrain.targets import Target


def weight_gradient(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """Return the gradient of ``w`` in ``y = Conv(x, w)``."""
    name = choose(op.target, facts_of(op, x, dy, w, win, group))
    return FORMS[name].build(op, x, dy, w, win, group)


def by_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One product ``dy @ x_t^T`` per tap, summed over the batch."""
    pieces = [_flatten(op, p, win.rank) for p in _tap_slices(op, x, win, group)]
    rows = _flatten(op, _split_channels(op, dy, group), win.rank)
    parts = [op.ReduceSum(op.MatMul(rows, op.mT(p)), [0], keepdims=0) for p in pieces]
    return _from_taps(op, parts, w)


def by_merged_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One product per tap over batch and positions at once: few large products, no sum after."""
    order = [1, 0, *win.axes]
    slices = tap_slices(op, op.Transpose(pad(op, x, win), perm=order), win)
    rows = _merged_rows(op, op.Transpose(dy, perm=order), group)
    parts = [op.MatMul(rows, op.mT(_merged_rows(op, p, group))) for p in slices]
    return _from_taps(op, parts, w)


def _merged_rows(op: OpBuilder, x: ir.Value, group: int) -> ir.Value:
    """[C, N, ...] -> [C, N * positions], or [group, C / group, N * positions]."""
    rows = op.Reshape(x, [0, -1])
    if group == 1:
        return rows
    channels = op.dims(x)[0]
    if isinstance(channels, int):
        return op.reshape(rows, [group, channels // group, -1])
    return op.reshape(rows, [group, -1, op.size(rows, 1)])


def by_im2col(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One product ``dy @ columns^T``, where the columns hold what every window reads."""
    pieces = _tap_slices(op, x, win, group)
    channel = -1 - win.rank
    columns = pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=channel)
    columns = _flatten(op, columns, win.rank)
    rows = _flatten(op, _split_channels(op, dy, group), win.rank)
    dw = op.ReduceSum(op.MatMul(rows, op.mT(columns)), [0], keepdims=0)  # [(group,) out, taps * in]
    if len(pieces) == 1:
        return op.reshape_like(dw, w)
    sizes = D.numbers(op.dims(w))
    if sizes is None:
        dw = op.Transpose(op.reshape(dw, [op.size(w, 0), len(pieces), -1]), perm=[0, 2, 1])
        return op.reshape_like(dw, w)
    # A Reshape at the end would be moved in front by onnxruntime, and the order of nodes with it.
    outs, channels, *kernel = sizes
    return op.Transpose(op.Reshape(dw, [outs, *kernel, channels]), perm=channels_second(win.rank))


def by_lifted_conv(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One convolution with an axis more: the batch is the channel, the channel an axis to slide on.

    ``x`` becomes [1, group * N, C, ...], ``dy`` the weight [O, N, 1, ...]; strides are dilations.
    """
    if group == 1:
        image = op.Unsqueeze(x, [0])
    else:
        split = _split_channels(op, x, group)
        split = op.Transpose(split, perm=[1, 0, *range(2, op.rank(split))])
        image = _merge(op, split, 0, lead=1)
    kernel = op.Unsqueeze(op.Transpose(dy, perm=[1, 0, *win.axes]), [2])
    dw = op.Conv(
        image,
        kernel,
        dilations=[1, *win.strides],
        group=group,
        pads=[0, *win.before, 0, *win.after],
        strides=[1, *win.dilations],
    )
    return op.Squeeze(_cut(op, dw, w, offset=1), [0])


def by_swapped_conv(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One convolution in which batch and channel trade places; stride and dilation swap.

    ``x`` becomes [C, group * N, ...], ``dy`` the weight [O, N, ...].
    """
    if group == 1:
        image = op.Transpose(x, perm=[1, 0, *win.axes])
    else:
        split = _split_channels(op, x, group)
        split = op.Transpose(split, perm=[2, 1, 0, *range(3, op.rank(split))])
        image = _merge(op, split, 1)
    kernel = op.Transpose(dy, perm=[1, 0, *win.axes])
    dw = op.Conv(
        image,
        kernel,
        dilations=win.strides,
        group=group,
        pads=win.pads,
        strides=win.dilations,
    )
    return op.Transpose(_cut(op, dw, w, offset=0), perm=[1, 0, *win.axes])


FORMS: Forms[ConvShape] = {
    "taps": Form(by_taps, lambda f: f.taps is not None),
    "merged": Form(by_merged_taps, lambda f: f.taps is not None),
    "im2col": Form(by_im2col, lambda f: f.taps is not None),
    "columns": Form(weight_by_columns, fits),
    "tap_columns": Form(weight_by_tap_columns, fits),
    "shifts": Form(weight_by_shifts, lambda f: f.shiftable),
    "group_columns": Form(weight_by_group_columns, lambda f: _tabled(f) and not f.depthwise),
    "signal_columns": Form(
        weight_by_signal_columns, lambda f: fits(f) and not f.strided and f.positions is not None
    ),
    "lifted": Form(by_lifted_conv),
    "swapped": Form(by_swapped_conv),
    "depthwise": Form(depthwise.weight_by_taps, lambda f: f.depthwise),
    "pairs": Form(depthwise.weight_by_pairs, lambda f: f.depthwise and f.pairs is not None),
    "row_pairs": Form(
        depthwise.weight_by_row_pairs,
        lambda f: f.depthwise and f.line_pairs is not None and f.pairs is not None,
    ),
    "scan": Form(
        depthwise.weight_by_scan, lambda f: f.depthwise and not f.strided and f.pairs is not None
    ),
}

_CPU: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.strided and f.pairs_up_to(T.WEIGHT_PAIRS_STRIDED)),
    Choice("pairs", lambda f: not f.strided and f.pairs_up_to(T.WEIGHT_PAIRS)),
    Choice("scan"),
    Choice("swapped", lambda f: f.depthwise and f.strided),
    Choice("depthwise"),
    Choice("lifted", lambda f: not f.few_taps),
    Choice("lifted", lambda f: f.group > 1 and f.strided),
    Choice("columns", by_product),
    Choice("tap_columns", lambda f: f.dense and f.small_kernel and _few_positions(f)),
    Choice("tap_columns", lambda f: f.dense and f.small_kernel and f.taps != 1 and f.strided),
    Choice("lifted", lambda f: f.small_image and f.tiny_image and not f.strided),
    Choice("merged", lambda f: f.small_image),
    Choice("im2col", lambda f: f.taps == 1),
    Choice("lifted", lambda f: f.narrow and f.strided and not f.small_kernel),
    Choice("im2col", lambda f: f.narrow),
    Choice("merged", lambda f: f.group == 1),
    Choice("taps"),
]
# A convolution with a kernel of the size of the image loses precision on WebGPU: products instead.
_PRODUCTS: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.WEIGHT_PAIRS_PRODUCTS)),
    Choice("depthwise"),
    Choice("im2col"),
    Choice("swapped"),
]
# A kernel of the size of the image takes a hundred times as long as a product on a GPU.
_CUDA: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.WEIGHT_PAIRS_GPU)),
    Choice("row_pairs", lambda f: f.line_pairs_up_to(T.WEIGHT_LINE_PAIRS_GPU)),
    Choice("tap_columns", lambda f: f.taps == 1 and not f.strided and _narrowing(f)),
    Choice("merged", lambda f: f.taps == 1 and f.small_image),
    Choice("im2col", lambda f: f.taps == 1),
    Choice("group_columns", lambda f: f.group > 1),
    Choice("im2col", lambda f: f.narrow and _joinable(f)),
    Choice("signal_columns", lambda f: _narrows(f)),
    Choice("shifts", lambda f: f.small_kernel),
    Choice("tap_columns"),
    Choice("im2col", lambda f: _joinable(f)),
    Choice("depthwise"),
    Choice("taps", lambda f: f.few_taps),
    Choice("swapped"),
]


def _narrowing(facts: ConvShape) -> bool:
    """Return whether images are small and what is read is wider than what is put out."""
    wide = facts.channels is not None and facts.outs is not None and facts.channels > facts.outs
    return wide and facts.small_image


def _tabled(facts: ConvShape) -> bool:
    """Return whether a table can say what every window reads, in images of known size."""
    known = None not in (facts.taps, facts.channels, facts.outs, facts.image, facts.positions)
    return known and (facts.taps or 0) * (facts.positions or 0) <= T.WINDOW_TABLE_ELEMENTS


def _narrows(facts: ConvShape) -> bool:
    """Return whether windows over the output are half as wide as those over the input, or less."""
    if facts.channels is None or facts.outs is None or facts.taps == 1:
        return False
    return 2 * facts.outs <= facts.channels


def _joinable(facts: ConvShape) -> bool:
    return facts.taps is not None and facts.taps <= T.CAPTURED_CONCAT_INPUTS


CHOICES: dict[str, Choices[ConvShape]] = {  # by family of targets
    "cpu": _CPU,
    "wasm": [Choice("im2col", lambda f: f.group == 1 and f.few_taps), *_CPU],
    "cuda": _CUDA,
    "products": _PRODUCTS,
}


def _few_positions(facts: ConvShape) -> bool:
    one_tap = facts.taps == 1
    return facts.positions_up_to(
        T.TAP_COLUMNS_POSITIONS_ONE_TAP if one_tap else T.TAP_COLUMNS_POSITIONS
    )


def choose(target: Target, facts: ConvShape) -> str:
    """Name the form for a target."""
    return pick(target, facts, FORMS, CHOICES.get(target.family, _PRODUCTS))


def _split_channels(op: OpBuilder, x: ir.Value, group: int) -> ir.Value:
    """[N, group * C, ...] -> [N, group, C, ...]; untouched if there is one group."""
    if group == 1:
        return x
    channels, *rest = op.dims(x)[1:]
    if isinstance(channels, int):
        split = [group, channels // group]
        unknown = sum(not isinstance(d, int) for d in rest)
        sizes = [
            -1 if unknown == 1 and not isinstance(d, int) else op.size(x, 2 + i)
            for i, d in enumerate(rest)
        ]
    else:
        split = [group, -1]
        sizes = [op.size(x, 2 + i) for i in range(len(rest))]
    return op.Reshape(x, op.vector([0, *split, *sizes]))  # 0: the batch, as it is


def _merge(op: OpBuilder, x: ir.Value, axis: int, lead: int = 0) -> ir.Value:
    """Join axes ``axis`` and ``axis + 1``, with ``lead`` axes of size 1 put in front."""
    dims = op.dims(x)
    sizes = [op.size(x, i) for i in range(len(dims)) if i not in (axis, axis + 1)]
    left, right = dims[axis], dims[axis + 1]
    sizes.insert(axis, left * right if isinstance(left, int) and isinstance(right, int) else -1)
    return op.Reshape(x, op.vector([*[1] * lead, *sizes]))


def _tap_slices(op: OpBuilder, x: ir.Value, win: Windows, group: int) -> list[ir.Value]:
    """Return what the windows read at each tap, as [N, C, ...] or [N, group, C, ...]."""
    split = _split_channels(op, pad(op, x, win), group)
    axes = list(range(op.rank(split) - win.rank, op.rank(split)))
    return tap_slices(op, split, win, axes)


def _flatten(op: OpBuilder, x: ir.Value, spatial: int) -> ir.Value:
    """Join the last axes to one."""
    return x if spatial == 1 else op.Reshape(x, [*[0] * (op.rank(x) - spatial), -1])


def _from_taps(op: OpBuilder, parts: list[ir.Value], w: ir.Value) -> ir.Value:
    """Return a weight from its values at each tap."""
    if len(parts) == 1:
        return op.reshape_like(parts[0], w)
    stacked = op.reshape(op.Concat(*parts, axis=0), [len(parts), -1])
    return op.reshape_like(op.Transpose(stacked, perm=[1, 0]), w)


def _cut(op: OpBuilder, dw: ir.Value, w: ir.Value, offset: int) -> ir.Value:
    """Cut what the stride left over: spatial axes to the size of the kernel."""
    have, want = op.dims(dw)[2 + offset :], op.dims(w)[2:]
    axes = [i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    if not axes:
        return dw
    ends = op.vector([op.size(w, 2 + i) for i in axes])
    return op.Slice(dw, [0] * len(axes), ends, [2 + offset + i for i in axes])
