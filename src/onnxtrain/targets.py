"""Targets: the runtimes that training graphs are generated for.

A target is data: what its runtime lacks, what it prefers. Rules, losses, optimizers and passes
never compare a target's name. They ask ``op.target.lacks("Sign")`` and emit a decomposed form, or
``op.target.prefers("conv-as-matmul")`` and choose among forms that compute the same values.
To add a target, add an entry to :data:`TARGETS`.

What a target lacks follows from the probed profile of its runtime (:mod:`onnxtrain.profiles`) and a
short list of exceptions, each with its reason.

>>> find("webgpu").lacks("Sign"), find("cpu").lacks("Sign")
(True, False)
>>> find("wasm").without("multi-step").prefers("multi-step")
False
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnxtrain import profiles
from onnxtrain.errors import PrepareError, expected_one_of

LACKS = {
    "ArgMax": "the class with the largest score, in an element type that kernels compute with",
    "Atan": "angles, such as those of CIoU's aspect ratio",
    "BatchNormalization.training_mode": "batch statistics",
    "Celu": "the activation",
    "Col2Im": "overlapping windows summed into an image",
    "ConstantOfShape": "a tensor filled with one value",
    "ConvTranspose.asymmetric_pads": "a transposed convolution with different padding at the end",
    "ConvTranspose.bfloat16": "a transposed convolution in bfloat16",
    "DFT": "the discrete Fourier transform",
    "Det": "determinants",
    "GatherElements": "the score of each row's label",
    "LayerNormalization.statistics": "mean and deviation as outputs of the normalization",
    "LogSoftmax": "log-probabilities",
    "MatMulNBits": "matmuls with block-quantized weights, and rows of such tables",
    "MaxPool.Indices": "the positions of the maxima",
    "MaxPool.opset22": "max pooling in models of opset 22 or newer",
    "MaxUnpool": "values scattered to the positions of the maxima",
    "NegativeLogLikelihoodLoss": "the loss operator",
    "Pad.bfloat16": "padding in bfloat16",
    "Range.int64": "consecutive integers",
    "Resize.bfloat16": "upsampling in bfloat16",
    "ScatterElements": "one element of each row replaced",
    "ScatterND.reduction": "rows added where they are scattered to",
    "Sign": "-1, 0 or 1",
    "Slice.bool": "a slice of a mask",
    "SoftmaxCrossEntropyLoss": "the loss operator",
    "Softplus": "log(1 + exp(x)) without overflow",
    "float16": "float16 matmuls, or values rounded to float16",
    "float64": "sums over many elements in double precision",
    "int64": "64-bit integer inputs",
    "output-binding": "outputs written to memory that the caller provides",
    "uint8": "optimizer state in 8 bits",
}
"""What a runtime may lack (an operator, a part of one, a type), and what we use it for."""

PREFERS = {
    "accumulate-in-float32": "accumulate 16-bit sums over many rows in float32",
    "batch-statistics-output": "take batch mean and variance from BatchNormalization's outputs",
    "batch-stats-via-layer-norm": "derive batch statistics from per-image LayerNormalization",
    "bfloat16-conv": "run convolutions and the operators between them in bfloat16 (on request)",
    "chunked-attention": "compute attention over long sequences for a part of the batch at a time",
    "chunked-loss": "compute the logits of a large vocabulary in a loop over chunks of rows",
    "coalesce-broadcast-dims": "merge adjacent dimensions that broadcast alike",
    "column-sums-as-matmul": "sum 16-bit rows by a matmul with ones",
    "conv-as-matmul": "compute convolutions of small images as one matmul over the batch",
    "data-dependent-shapes": "select few rows by their values instead of processing all rows",
    "expand-channel-vectors": "expand per-channel vectors where each channel has few positions",
    "few-operators": "minimize the number of kernels, even where that moves more memory",
    "flatten-batch-dims": "merge batch and sequence dimensions between the reshapes that need them",
    "float16-matmul": "multiply matrices in float16; other targets round operands and results",
    "fold-channel-scale": "fold a channel scale into the adjacent weight where that is smaller",
    "fold-constant-masks": "constant-fold input-independent masks, once for all rows of a batch",
    "fold-row-subtraction": "fold a subtraction from the rows of a wide matmul into the matmul",
    "fuse-add-chain": "add three or more tensors in one Sum",
    "fuse-attention": "run the forward pass of 16-bit attention in the fused kernel",
    "fuse-gelu": "replace decomposed GELU by the Gelu operator",
    "fuse-rotary-embedding": "use RotaryEmbedding where the opset has it",
    "fuse-running-stats": "update the running statistics of all layers as one vector",
    "fuse-sgd-into-gemm": "fuse the plain SGD update into the weight gradient's Gemm",
    "fused-affine": "apply scale and bias with one normalization kernel",
    "fused-row-affine": "apply per-row scale and bias with a normalization kernel in one pass",
    "gelu-grad-lookup-table": "look up bfloat16 activation gradients in a table",
    "gemm-without-trans-a": "transpose the left operand in front of a Gemm",
    "group-norm-via-layer-norm": "compute GroupNormalization from LayerNormalization of each image",
    "masks-by-cast": "test for nonzero with Cast instead of a comparison",
    "maxpool-indices": "recover the positions of maxima with a second pooling",
    "mean-from-known-sum": "derive the mean of a gradient from a sum that exists already",
    "means-as-matmul": "compute row means as a matmul with a constant vector",
    "multi-step": "run several training steps of a small model in one call",
    "narrow-cross-entropy-grad": "round cross entropy's gradient before subtracting the labels",
    "pad-attention-keys": "pad the number of keys so that rows of attention scores are aligned",
    "pad-vocabulary": "pad the number of classes so that rows of logits are aligned",
    "rematerialize": "recompute cheap activations in the backward pass instead of storing them",
    "remove-nan-guard": "zero fully masked attention rows only where they can occur",
    "resize-grad-by-pooling": "sum the copies of a position with a pooling kernel",
    "row-sums-from-attention-output": "derive the row sums of attention's gradient from its output",
    "scale-after-matmul": "scale rows behind a matmul instead of in front of it",
    "scatter-nd-per-element": "add rows to tables by matmul, or with one index per element",
    "split-noncontiguous-reductions": "split reductions over non-adjacent dimensions in two",
    "split-qkv": "slice queries, keys and values out of their joint projection",
    "unfuse-gemm-bias": "add biases behind large matmuls instead of inside them",
    "unpack-nbits-weights": "unpack n-bit weights with byte operators in front of MatMul",
    "unroll-loops": "copy the bodies of loops over time, once per step, so that they are captured",
    "vector-update": "concatenate parameters and optimizer state into long vectors",
}
"""What a runtime may prefer among forms that compute the same values."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime that graphs are generated for.

    Attributes:
        name: the name in ``build(target=...)`` and in the manifest.
        profile: the profile that says what its runtime can run at all; ``None`` for any runtime.
        missing: names of :data:`LACKS`.
        preferences: names of :data:`PREFERS`.
        family: its entry in tables of variants, such as those of convolutions.
        gpu: whether nodes without a kernel leave a device.
    """

    name: str
    profile: str | None = None
    missing: frozenset[str] = frozenset()
    preferences: frozenset[str] = frozenset()
    family: str = "portable"
    gpu: bool = False

    def __post_init__(self) -> None:
        unknown = sorted((self.missing - LACKS.keys()) | (self.preferences - PREFERS.keys()))
        if unknown:
            raise PrepareError(
                f"target {self.name!r}: unknown capability or preference: {', '.join(unknown)}\n"
                "hint: use the names of LACKS and PREFERS in onnxtrain.targets"
            )

    def lacks(self, capability: str) -> bool:
        """Return whether the runtime lacks an operator, a part of one, or a type."""
        assert capability in LACKS, f"{capability!r} is not in LACKS"
        return capability in self.missing

    def prefers(self, preference: str) -> bool:
        """Return whether a form is the faster one."""
        assert preference in PREFERS, f"{preference!r} is not in PREFERS"
        return preference in self.preferences

    def without(self, *preferences: str) -> Target:
        """Return the target without some preferences."""
        return dataclasses.replace(self, preferences=self.preferences - set(preferences))


ALSO_MISSING: dict[str, Mapping[str, str]] = {
    "cuda": {
        "ConvTranspose.asymmetric_pads": "cuDNN pads both ends alike; the probe has no such case",
        "ConvTranspose.bfloat16": "the probe has no bfloat16 case; the kernel is not registered",
        "Pad.bfloat16": "the probe has no bfloat16 case; the kernel is not registered",
        "Resize.bfloat16": "the probe has no bfloat16 case; the kernel is not registered",
    },
    "openvino": {
        "MatMulNBits": "com.microsoft is not probed",
    },
    "wasm": {"output-binding": "onnxruntime-web allocates outputs itself"},
    "webgpu": {
        "ArgMax": "the result is int64, which no WebGPU kernel casts",
        "BatchNormalization.training_mode": "the kernel refuses training_mode=1",
        "GatherElements": "the kernel takes int32 indices; labels would have to be int64",
        "MaxPool.Indices": "the kernel refuses the second output",
        "Range.int64": "there are no int64 kernels",
        "ScatterElements": "the native provider has a kernel, the browser's does not",
        "Slice.bool": "there is no bool kernel",
        "Softplus": "the native provider has a kernel, the browser's does not",
        "float16": "needs the shader-f16 feature, which not every device has",
        "float64": "WGSL has no double",
        "int64": "WGSL has no 64-bit integers",
        "output-binding": "onnxruntime-web allocates outputs itself",
        "uint8": "WGSL has no 8-bit integers",
    },
}
"""What a target lacks although its profile does not say so, and why."""

NOT_MISSING: dict[str, Mapping[str, str]] = {
    "openvino": {
        "ConstantOfShape": "refused alone, and taken in a graph",
        "Slice.bool": "refused alone, and taken in a graph",
    },
    "webgpu": {
        "Celu": "a Celu of the user's model runs on the CPU; nothing we emit contains it",
        "Col2Im": "runs on the CPU",
        "Det": "runs on the CPU",
        "MaxPool.opset22": "training graphs for the browser are of an older opset",
    },
}
"""What a target has for our purposes although its profile lacks it, and why."""


def _missing(target: str, profile: str) -> frozenset[str]:
    probed = profiles.missing(profile, LACKS)
    return (probed - NOT_MISSING.get(target, {}).keys()) | ALSO_MISSING.get(target, {}).keys()


# The CPU has every preference that is not listed here, so a new one applies to it by default.
_CPU_PREFERENCES = PREFERS.keys() - {
    "pad-vocabulary",
    "pad-attention-keys",
    "chunked-attention",
    "fuse-attention",
    "bfloat16-conv",
    "unfuse-gemm-bias",
    "column-sums-as-matmul",
    "few-operators",
    "fold-constant-masks",
    "coalesce-broadcast-dims",
    "float16-matmul",
    "fuse-gelu",
    "mean-from-known-sum",
    "group-norm-via-layer-norm",
    "fuse-running-stats",
    "rematerialize",
    "fused-row-affine",
    "remove-nan-guard",
    "masks-by-cast",
    "unpack-nbits-weights",
    "resize-grad-by-pooling",
    "fold-row-subtraction",
    "fold-channel-scale",
    "scatter-nd-per-element",
    "multi-step",
    "narrow-cross-entropy-grad",
    "gelu-grad-lookup-table",
    "split-noncontiguous-reductions",
    "batch-stats-via-layer-norm",
    "fuse-add-chain",
    "accumulate-in-float32",
    "row-sums-from-attention-output",
    "unroll-loops",
}

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            "cpu",
            profile="ort-cpu",
            missing=_missing("cpu", "ort-cpu"),
            preferences=frozenset(_CPU_PREFERENCES),
            family="cpu",
        ),
        Target(
            "cuda",
            profile="ort-cuda",
            missing=_missing("cuda", "ort-cuda"),
            preferences=frozenset(
                {
                    "fused-affine",
                    "pad-vocabulary",
                    "pad-attention-keys",
                    "chunked-attention",
                    "fuse-attention",
                    "bfloat16-conv",
                    "unfuse-gemm-bias",
                    "column-sums-as-matmul",
                    "fold-constant-masks",
                    "coalesce-broadcast-dims",
                    "float16-matmul",
                    "fuse-gelu",
                    "mean-from-known-sum",
                    "group-norm-via-layer-norm",
                    "fuse-running-stats",
                    "rematerialize",
                    "fused-row-affine",
                    "remove-nan-guard",
                    "masks-by-cast",
                    "resize-grad-by-pooling",
                    "fold-row-subtraction",
                    "scale-after-matmul",
                    "fold-channel-scale",
                    "scatter-nd-per-element",
                    "narrow-cross-entropy-grad",
                    "gelu-grad-lookup-table",
                    "split-noncontiguous-reductions",
                    "batch-stats-via-layer-norm",
                    "fuse-add-chain",
                    "accumulate-in-float32",
                    "row-sums-from-attention-output",
                    "unroll-loops",
                    "vector-update",
                }
            ),
            family="cuda",
            gpu=True,
        ),
        Target(
            "wasm",
            profile="ort-cpu",
            missing=_missing("wasm", "ort-cpu"),
            preferences=frozenset(
                {"chunked-loss", "means-as-matmul", "unpack-nbits-weights", "multi-step"}
            ),
            family="wasm",
        ),
        Target(
            "webgpu",
            profile="ort-webgpu-native",
            missing=_missing("webgpu", "ort-webgpu-native"),
            preferences=frozenset({"few-operators", "remove-nan-guard", "means-as-matmul"}),
            family="products",
            gpu=True,
        ),
        # Without vector updates: OpenVINO 1.24 splits their gradient models into subgraphs that
        # depend on each other, and onnxruntime then refuses the graph as cyclic.
        Target(
            "openvino",
            profile="ort-openvino",
            missing=_missing("openvino", "ort-openvino"),
            preferences=frozenset({"means-as-matmul"}),
            family="products",
        ),
        # No particular runtime: operators that nearly every runtime has, easy to lower further.
        Target(
            "portable",
            missing=frozenset(
                {
                    *("GatherElements", "LogSoftmax", "MatMulNBits", "MaxPool.Indices"),
                    *("MaxUnpool", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
                    "Softplus",
                    "float64",
                }
            ),
            preferences=frozenset({"means-as-matmul"}),
            family="products",
        ),
    )
}
"""All targets by name."""

BUNDLES = {"web": ("wasm", "webgpu")}
"""Names of several targets that are built into one directory."""


def find(target: str | Target, *, bundles: bool = False) -> Target:
    """Return a target by name.

    Args:
        target: a name; a :class:`Target` is returned unchanged.
        bundles: whether the caller also accepts :data:`BUNDLES`; only for the hint.

    Raises:
        PrepareError: if the name is unknown.
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        known = [*TARGETS, *(BUNDLES if bundles else ())]
        raise PrepareError(f"unknown target: {target!r} {expected_one_of(target, known)}")
    return TARGETS[target]


__all__ = [
    "ALSO_MISSING",
    "BUNDLES",
    "LACKS",
    "NOT_MISSING",
    "PREFERS",
    "TARGETS",
    "Target",
    "find",
]
