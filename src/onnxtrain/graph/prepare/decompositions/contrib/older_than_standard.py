"""What onnxruntime puts into the standard domain by itself; see ``runtime_operators``."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.builder.size_arithmetic import minus
from onnxtrain.graph.prepare.decompose import decomposition


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
