"""The forms that operators have at older opsets."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.forms.draft import Draft, UnfitError
from onnxtrain.lowering.forms.registry import form


def _axes(d: Draft, i: int) -> list[int] | None:
    array = d.constant(i, "axes")
    return None if array is None else [int(a) if a >= 0 else int(a) + d.rank() for a in array.flat]


_REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]


@form(*(f"Reduce{r}" for r in _REDUCTIONS), below=18)
@form("ReduceSum", below=13)
def _reduce(d: Draft) -> None:
    noop = d.get("noop_with_empty_axes")
    d.attributes.pop("noop_with_empty_axes", None)
    axes = _axes(d, 1)
    if not axes and noop:
        raise UnfitError(f"{d.op_type} over no axes is not there")
    if axes or d.has_rank():  # without the attribute, it is over all axes
        d.set("axes", axes or list(range(d.rank())))
    d.keep_inputs(1)


@form("Squeeze", below=13)
def _squeeze(d: Draft) -> None:
    axes = _axes(d, 1)
    if axes is None:
        axes = [i for i, size in enumerate(d.dims()) if size == 1]
        if not all(isinstance(size, int) for size in d.dims()):
            raise UnfitError("Squeeze of symbolic sizes needs axes there")
    d.set("axes", axes)
    d.keep_inputs(1)


@form("Unsqueeze", below=13)
def _unsqueeze(d: Draft) -> None:
    array = d.constant(1, "axes")
    assert array is not None
    rank = d.rank() + array.size
    d.set("axes", sorted(int(a) % rank for a in array.reshape(-1)))
    d.keep_inputs(1)


@form("Split", below=18)
def _split_parts(d: Draft) -> None:
    parts = d.get("num_outputs")
    d.attributes.pop("num_outputs", None)
    if parts is None:
        return
    size = d.dims()[d.get("axis")]
    if not isinstance(size, int):
        raise UnfitError("Split of a symbolic size into parts is not there")
    each = -(-size // parts)
    rest = [min(each, size - i * each) for i in range(parts)]
    d.inputs[1:] = [np.asarray(rest, np.int64)]


@form("Split", below=13)
def _split(d: Draft) -> None:
    sizes = d.constant(1, "the sizes")
    if sizes is not None:
        d.set("split", [int(s) for s in sizes])
    d.keep_inputs(1)


@form("Clip", below=11)
def _clip(d: Draft) -> None:
    for i, name in ((1, "min"), (2, "max")):
        bound = d.constant(i, name)
        if bound is not None:
            d.set(name, float(bound.reshape(())))
    d.keep_inputs(1)


@form("Pad", below=19)
def _pad_mode(d: Draft) -> None:
    if d.get("mode") == "wrap":
        raise UnfitError("Pad of mode wrap is not there")


@form("Pad", below=18)
def _pad_axes(d: Draft) -> None:
    axes = _axes(d, 3)
    if axes is None:
        return
    pads, rank = d.constant(1, "pads"), d.rank()
    assert pads is not None
    full = np.zeros(2 * rank, np.int64)
    for i, a in enumerate(axes):
        full[a], full[a + rank] = pads[i], pads[i + len(axes)]
    d.inputs[1] = full
    d.keep_inputs(3)


@form("Pad", below=11)
def _pad(d: Draft) -> None:
    pads, value = d.constant(1, "pads"), d.constant(2, "the filler")
    assert pads is not None
    d.set("pads", [int(p) for p in pads])
    if value is not None:
        d.set("value", float(value.reshape(())))
    d.keep_inputs(1)


@form("Slice", below=10)
def _slice(d: Draft) -> None:
    starts, ends = d.constant(1, "starts"), d.constant(2, "ends")
    steps = d.constant(4, "steps")
    assert starts is not None
    assert ends is not None
    if steps is not None and any(steps != 1):
        raise UnfitError("Slice with steps is not there")
    axes = _axes(d, 3) or list(range(starts.size))
    d.set("starts", [int(s) for s in starts])
    d.set("ends", [int(e) for e in ends])
    d.set("axes", axes)
    d.keep_inputs(1)


@form("TopK", below=10)
def _top_k(d: Draft) -> None:
    k = d.constant(1, "k")
    assert k is not None
    d.set("k", int(k.reshape(())))
    d.keep_inputs(1)


@form("Dropout", below=12)
def _dropout(d: Draft) -> None:
    training = d.constant(2, "training_mode")
    if training is not None and bool(training):
        raise UnfitError("Dropout in training mode is not there")
    if any(y.uses() or y.is_graph_output() for y in d.node.outputs[1:]):
        raise UnfitError("the mask of Dropout at inference is not specified there")
    ratio = d.constant(1, "ratio")
    if ratio is not None:
        d.set("ratio", float(ratio))
    d.attributes.pop("seed", None)
    d.keep_inputs(1)


@form("BatchNormalization", below=14)
def _batch_normalization(d: Draft) -> None:
    d.drop("training_mode", 0)


@form("Softmax", "LogSoftmax", "Hardmax", below=13)
def _softmax(d: Draft) -> None:
    behind = d.dims()[d.get("axis") % d.rank() + 1 :]
    if any(size != 1 for size in behind):
        raise UnfitError(f"{d.op_type} along an axis before the last is not there")


@form("Gemm", below=11)
def _gemm(d: Draft) -> None:
    if d.input(2) is None:
        a = d.inputs[0]
        assert isinstance(a, ir.Value)
        assert a.dtype is not None
        d.inputs[2:] = [np.zeros(1, a.dtype.numpy())]


@form("Max", "Min", "Sum", "Mean", below=8)
def _same_shapes(d: Draft) -> None:
    first = d.inputs[0]
    for x in d.inputs[1:]:
        if not (isinstance(x, ir.Value) and isinstance(first, ir.Value) and S.same_shape(x, first)):
            raise UnfitError(f"{d.op_type} does not broadcast there")


@form("Reshape", below=14)
def _reshape(d: Draft) -> None:
    if not d.get("allowzero"):
        return
    shape = d.input(1)
    elements = S.symbolic_of(shape) if isinstance(shape, ir.Value) else None
    if elements is None or 0 in elements:
        raise UnfitError("Reshape to a size of zero is not there")
    d.attributes.pop("allowzero", None)


@form("Shape", below=15)
def _shape(d: Draft) -> None:
    start, end = d.get("start"), d.get("end")
    starts = start == 0 or start <= -d.rank()
    if not starts or (end is not None and end < d.rank()):
        raise UnfitError("Shape of some axes only is not there")
    d.attributes.pop("start", None)
    d.attributes.pop("end", None)


@form("Cast", below=24)
def _cast(d: Draft) -> None:
    d.attributes.pop("round_mode", None)  # means something for float8e8m0 only


@form("LSTM", "GRU", "RNN", below=14)
def _recurrent(d: Draft) -> None:
    d.drop("layout", 0)


@form("ScatterElements", "ScatterND", below=18)
def _scatter(d: Draft) -> None:
    if d.get("reduction") in ("max", "min"):
        raise UnfitError(f"{d.op_type} with reduction {d.get('reduction')} is not there")


@form("ScatterElements", below=11)
def _scatter_elements(d: Draft) -> None:
    d.drop("reduction", "none")
    d.op_type = "Scatter"
    d.attributes = {"axis": ir.AttrInt64("axis", d.get("axis"))}


@form("GatherND", below=12)
def _gather_nd(d: Draft) -> None:
    d.drop("batch_dims", 0)


@form("AveragePool", "MaxPool", below=10)
def _pool(d: Draft) -> None:
    d.drop("ceil_mode", 0)
    dilations = d.get("dilations")
    if dilations and set(dilations) != {1}:
        raise UnfitError(f"{d.op_type} with dilations is not there")
    d.attributes.pop("dilations", None)


@form("AveragePool", below=19)
def _average_pool(d: Draft) -> None:
    dilations = d.get("dilations")
    if dilations and set(dilations) != {1}:
        raise UnfitError("AveragePool with dilations is not there")
    d.attributes.pop("dilations", None)


@form("DepthToSpace", below=11)
def _depth_to_space(d: Draft) -> None:
    d.drop("mode", "DCR")


@form("RoiAlign", below=16)
def _roi_align(d: Draft) -> None:
    # The only mode there, and not the default of later versions.
    d.drop("coordinate_transformation_mode", "output_half_pixel")


@form("GridSample", below=20)
def _grid_sample(d: Draft) -> None:
    names = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}
    if d.rank() != 4:
        raise UnfitError("GridSample of other than 4 dimensions is not there")
    d.set("mode", names[d.get("mode")])


@form("DFT", below=20)
def _dft(d: Draft) -> None:
    axis = d.constant(2, "the axis")
    d.set("axis", -2 % d.rank() if axis is None else int(axis) % d.rank())
    d.keep_inputs(2)
