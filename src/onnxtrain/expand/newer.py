"""Standard operators that are newer than the working opset.

What onnxruntime puts into the standard domain by itself; see ``runtime_operators``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import decomposition
from onnxtrain.graph.builder import minus


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


@decomposition("com.microsoft::LayerNormalization")
def layer_normalization(op, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """The standard operator of the same name, in files older than it; three outputs."""
    return op.LayerNormalization(
        x, scale, bias, axis=axis, epsilon=epsilon, stash_type=stash_type, _outputs=3
    )


@decomposition("com.microsoft::Affine")
def affine(op, x, *, alpha=1.0, beta=0.0):
    """``alpha * x + beta``."""
    return op.Add(op.Mul(x, alpha), beta)


@decomposition("com.microsoft::Scale")
def scale(op, x, *, scale=1.0):
    """``scale * x``."""
    return op.Mul(x, scale)


@decomposition("com.microsoft::ScaledTanh")
def scaled_tanh(op, x, *, alpha=0.0, beta=0.0):
    """``alpha * tanh(beta * x)``."""
    return op.Mul(op.Tanh(op.Mul(x, beta)), alpha)


@decomposition("com.microsoft::ParametricSoftplus")
def parametric_softplus(op, x, *, alpha=0.0, beta=0.0):
    """``alpha * log(1 + exp(beta * x))``."""
    return op.Mul(op.Softplus(op.Mul(x, beta)), alpha)


@decomposition("com.microsoft::ThresholdedRelu")
def thresholded_relu(op, x, *, alpha=1.0):
    """The standard operator of the same name, in files older than it."""
    return op.ThresholdedRelu(x, alpha=alpha)


@decomposition("com.microsoft::ImageScaler")
def image_scaler(op, x, *, bias=None, scale=1.0):
    """``scale * x`` plus a number per channel."""
    y = op.Mul(x, scale)
    if not bias:
        return y
    return op.Add(y, op.const(np.asarray(bias).reshape(1, -1, 1, 1), x.dtype))


@decomposition("com.microsoft::Crop")
def crop(op, x, *, border=None, scale=None):
    """A part of each image: ``border`` is left, top, right, bottom; ``scale`` height and width."""
    left, top, right, bottom = border or [0, 0, 0, 0]
    if scale:
        ends = [top + scale[0], left + scale[1]]
    else:
        ends = [minus(op, op.size(x, 2), bottom), minus(op, op.size(x, 3), right)]
    return op.Slice(x, [top, left], op.vector(ends), [2, 3])


@decomposition("com.microsoft::DynamicSlice")
def dynamic_slice(op, x, starts, ends, axes=None):
    """Slice by the standard's operator, which takes the same inputs since opset 10."""
    return op.Slice(x, starts, ends, axes)
