"""Standard operators that are newer than the working opset."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.prepare.decompose import decomposition


@decomposition("Swish")
def swish(op, x, *, alpha=1.0):
    """``x * sigmoid(alpha * x)``."""
    return op.Mul(x, op.Sigmoid(x if alpha == 1.0 else op.Mul(x, alpha)))


@decomposition("RMSNormalization")
def rms_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the axes from ``axis`` on.

    The root is computed in ``stash_type``.
    """
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = op.cast(x, ir.DataType(stash_type))
    mean = op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1)
    normal = op.Div(wide, op.Sqrt(op.Add(mean, epsilon)))
    return op.Mul(op.cast(normal, x.dtype), scale)


@decomposition("CumProd")
def cum_prod(op, x, axis, *, exclusive=0, reverse=0):
    """A ``Scan`` that multiplies; needs a constant axis."""
    where = op.constant(axis)
    if where is None:
        return None
    at = int(where.reshape(-1)[0]) % op.rank(x)
    first = op.ReduceProd(op.Slice(x, [0], [0], [at]), [at], keepdims=0)  # ones: an empty product
    body = op.body([first, first])
    so_far, here = body.graph.inputs
    product = body.Mul(so_far, here)
    body.graph.outputs.extend([product, body.Identity(so_far if exclusive else product)])
    _, y = op.Scan(
        first,
        x,
        body=body.graph,
        num_scan_inputs=1,
        scan_input_axes=[at],
        scan_output_axes=[at],
        scan_input_directions=[reverse],
        scan_output_directions=[reverse],
        _outputs=2,
    )
    y.shape = x.shape
    return y
