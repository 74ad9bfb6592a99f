"""What each kind of runtime has, lacks and prefers: a target is data.

Rules, losses, optimizers and passes never ask for a target by name. They ask what it lacks
(``op.target.lacks("Sign")``), and then emit a composed form, or what it prefers
(``op.target.prefers("bias-as-weight-column")``), and then choose among forms that give the same
numbers. To add a target, add an entry to :data:`TARGETS`.

>>> find("webgpu").lacks("Sign"), find("cpu").lacks("Sign")
(True, False)
>>> find("wasm").without("several-steps").prefers("several-steps")
False
"""

from __future__ import annotations

import dataclasses

from onnxtrain.errors import PrepareError

LACKS = {
    "ArgMax": "the class of the largest score, in a type that can be computed with",
    "BatchNormalization.training_mode": "statistics of the batch",
    "Celu": "an exponential below zero, and a line above",
    "Col2Im": "windows added up to an image",
    "ConstantOfShape": "a tensor of one value",
    "ConvTranspose.asymmetric_pads": "a transposed convolution with other padding at the end",
    "ConvTranspose.bfloat16": "a transposed convolution in 16 bits",
    "DFT": "a Fourier transform",
    "Det": "determinants",
    "GatherElements": "one element per row, by a label",
    "LogSoftmax": "logarithms of probabilities",
    "MatMulNBits": "products with weights of few bits, packed in blocks, and rows of such tables",
    "MaxPool.Indices": "where the maxima are",
    "MaxPool.opset22": "maxima of windows, in files of that opset",
    "MaxUnpool": "values put where the maxima were",
    "NegativeLogLikelihoodLoss": "the loss of labels",
    "Pad.bfloat16": "borders around images in 16 bits",
    "Range.int64": "whole numbers up to a size",
    "Resize.bfloat16": "images made larger, in 16 bits",
    "ScatterElements": "one element per row, replaced",
    "Sign": "-1, 0 or 1",
    "Slice.bool": "a part of a mask",
    "SoftmaxCrossEntropyLoss": "the loss of labels",
    "Softplus": "log(1 + e^x) that does not overflow",
    "float16": "products in 16 bits, or rounded to them",
    "float64": "sums of very many numbers",
    "int64": "inputs of 64 bits",
    "output-binding": "results written to memory of the caller's choice",
}
"""What a runtime may lack: an operator, a part of one, or a type; and what it is used for here."""

PREFERS = {
    "fold-norm-scale": "scale and shift of a LayerNormalization inside the layers that read it",
    "fused-affine": "scale and shift by one operator made for something else",
    "pad-vocabulary": "a few classes more, so that rows of scores are whole words",
    "pad-attention-keys": "a few keys more, so that rows of attention's scores are whole words",
    "chunked-attention": "scores of long sequences for a part of the batch at a time",
    "fuse-attention": "attention in 16 bits by its own operator, in the forward pass",
    "batch-statistics-output": "the batch's mean and variance from BatchNormalization itself",
    "bfloat16-conv": "convolutions and what lies between them in bfloat16, if asked for",
    "unfuse-gemm-bias": "biases added behind large products, not inside them",
    "bias-as-weight-column": "the bias of a wide layer as one more column of its weight",
    "column-sums-as-matmul": "sums of 16-bit numbers over rows as products with ones",
    "conv-as-matmul": "convolutions of small images as one product over the batch",
    "data-dependent-shapes": "few rows chosen by their values, where all would cost a pass",
    "fuse-sgd-into-gemm": "plain descent inside the products that make gradients",
    "few-operators": "fewer operators, each a kernel to start, even where they move more",
    "fold-constant-masks": "masks that depend on no input are folded, once for all rows of a batch",
    "coalesce-broadcast-dims": "axes that a broadcast treats alike joined to one",
    "float16-matmul": "products in 16 bits; elsewhere operands and results are rounded to them",
    "fuse-gelu": "GELU by its own operator where a file has it written out",
    "gemm-without-trans-a": "a transposed left operand made before the product",
    "mean-from-known-sum": "the mean of a gradient from its sum, not again from what is left",
    "group-norm-via-layer-norm": "groups of channels normalised out of their normalised images",
    "fuse-running-stats": "running averages of many vectors as one",
    "rematerialize": "values made again in the backward pass where that is one pass",
    "fused-row-affine": "lines and normalised rows by operators for normalisation, not two passes",
    "chunked-loss": "the scores of a large vocabulary for some rows at a time, in a loop",
    "remove-nan-guard": "rows that are masked as a whole set to zero behind attention",
    "masks-by-cast": "what is not zero by a cast, not by a comparison",
    "maxpool-indices": "the places of maxima by a second pooling",
    "means-as-matmul": "means over rows as products with a vector",
    "unpack-nbits-weights": "n-bit weights are unpacked by operators on bytes before MatMul",
    "resize-grad-by-pooling": "sums over copies of a position by the kernel that pools",
    "expand-channel-vectors": "numbers per channel repeated for each of few positions",
    "fuse-rotary-embedding": "RotaryEmbedding instead of its parts, if the opset has it",
    "fold-row-subtraction": "what is subtracted from the rows of a wide product inside of it",
    "flatten-batch-dims": "batch and sequence joined to one axis between the views that need them",
    "scale-after-matmul": "a scale of rows behind the product instead of in front of it",
    "fold-channel-scale": "a scale of channels in the weights that they meet, if these are smaller",
    "scatter-nd-per-element": "rows added to tables by products, or an index for each element",
    "multi-step": "several steps of a small model in one call",
    "narrow-cross-entropy-grad": "round the gradient of cross entropy before labels are subtracted",
    "gelu-grad-lookup-table": "slopes of activations in bfloat16 out of a table",
    "split-qkv": "queries, keys and values cut out where they lie",
    "split-noncontiguous-reductions": "sums over axes with a gap between them in two steps",
    "batch-stats-via-layer-norm": "mean and variance of a batch out of those of its images",
    "fuse-matmul-add": "products of matrices that start from what would be added to them",
    "fuse-add-chain": "three or more tensors added by one operator",
    "accumulate-in-float32": "sums of 16-bit numbers over many rows in float32",
    "row-sums-from-attention-output": "row sums of attention's gradient, from its output",
    "vector-update": "parameters and state joined to long vectors for the update",
}
"""What a runtime may prefer among forms that give the same numbers."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of runtime.

    Attributes:
        name: what ``build(target=...)`` calls it, and what the manifest says.
        profile: of the lowering, what its runtime can run at all; ``None`` if any runtime will do.
        missing: names of :data:`LACKS`.
        preferences: names of :data:`PREFERS`.
        family: the entry that tables of forms have for it, such as those of convolutions.
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
                f"target {self.name!r}: nobody asks for {', '.join(unknown)}\n"
                "hint: the names are those of LACKS and PREFERS in onnxtrain.targets"
            )

    def lacks(self, what: str) -> bool:
        """Return whether the runtime has no use for an operator, a part of one, or a type."""
        assert what in LACKS, f"{what!r} is not in LACKS"
        return what in self.missing

    def prefers(self, form: str) -> bool:
        """Return whether a form is the faster one."""
        assert form in PREFERS, f"{form!r} is not in PREFERS"
        return form in self.preferences

    def without(self, *forms: str) -> Target:
        """Return the target with some preferences less."""
        return dataclasses.replace(self, preferences=self.preferences - set(forms))


# A new preference is one of the CPU's unless it is named here.
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
}

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            "cpu",
            profile="ort-cpu",
            preferences=frozenset(_CPU_PREFERENCES),
            family="cpu",
        ),
        Target(
            "cuda",
            profile="ort-cuda",
            missing=frozenset(
                {
                    "BatchNormalization.training_mode",
                    "Celu",
                    "Col2Im",
                    "ConvTranspose.asymmetric_pads",
                    "ConvTranspose.bfloat16",
                    "DFT",
                    "Det",
                    "MaxPool.opset22",
                    "MaxUnpool",
                    "Pad.bfloat16",
                    "Resize.bfloat16",
                }
            ),
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
                    "vector-update",
                }
            ),
            family="cuda",
            gpu=True,
        ),
        Target(
            "wasm",
            profile="ort-cpu",
            missing=frozenset({"output-binding"}),
            preferences=frozenset(
                {"chunked-loss", "means-as-matmul", "unpack-nbits-weights", "multi-step"}
            ),
            family="wasm",
        ),
        Target(
            "webgpu",
            profile="ort-webgpu-native",
            missing=frozenset(
                {
                    *("ArgMax", "BatchNormalization.training_mode", "ConstantOfShape"),
                    *("GatherElements", "LogSoftmax", "MaxPool.Indices", "MaxUnpool"),
                    *("NegativeLogLikelihoodLoss", "Range.int64", "ScatterElements", "Sign"),
                    *("Slice.bool", "SoftmaxCrossEntropyLoss", "Softplus", "float16", "float64"),
                    *("int64", "output-binding"),
                }
            ),
            preferences=frozenset({"few-operators", "remove-nan-guard", "means-as-matmul"}),
            family="products",
            gpu=True,
        ),
        # Operators that nearly every runtime has, in forms that can be lowered further.
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
"""Names that stand for several targets in one directory."""


def find(target: str | Target, *, bundles: bool = False) -> Target:
    """Return a target by its name.

    Args:
        target: a name, or a target, which is returned as it is.
        bundles: whether the caller takes names of several targets too; only for the hint.

    Raises:
        PrepareError: if there is none of that name.
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        names = ", ".join([*TARGETS, *(BUNDLES if bundles else ())])
        raise PrepareError(f"no such target: {target!r}\nhint: one of {names}")
    return TARGETS[target]


__all__ = ["BUNDLES", "LACKS", "PREFERS", "TARGETS", "Target", "find"]
