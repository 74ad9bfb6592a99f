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
    "absorb-norm-scale": "scale and shift of a LayerNormalization inside the layers that read it",
    "affine-in-one-pass": "scale and shift by one operator made for something else",
    "aligned-classes": "a few classes more, so that rows of scores are whole words",
    "aligned-keys": "a few keys more, so that rows of attention's scores are whole words",
    "attention-in-parts": "scores of long sequences for a part of the batch at a time",
    "attention-operator": "attention in 16 bits by its own operator, in the forward pass",
    "batch-statistics-output": "the batch's mean and variance from BatchNormalization itself",
    "bfloat16-images": "convolutions and what lies between them in bfloat16, if asked for",
    "bias-apart": "biases added behind large products, not inside them",
    "bias-as-weight-column": "the bias of a wide layer as one more column of its weight",
    "column-sums-by-product": "sums of 16-bit numbers over rows as products with ones",
    "conv-as-matmul": "convolutions of small images as one product over the batch",
    "data-dependent-sizes": "few rows chosen by their values, where all would cost a pass",
    "descent-in-products": "plain descent inside the products that make gradients",
    "few-operators": "fewer operators, each a kernel to start, even where they move more",
    "fixed-masks": "masks that depend on no input in the file, once for all rows of a batch",
    "flat-broadcasts": "axes that a broadcast treats alike joined to one",
    "float16-products": "products in 16 bits; elsewhere operands and results are rounded to them",
    "gelu-operator": "GELU by its own operator where a file has it written out",
    "gemm-without-trans-a": "a transposed left operand made before the product",
    "given-means": "the mean of a gradient from its sum, not again from what is left",
    "groups-by-layer-norm": "groups of channels normalised out of their normalised images",
    "joined-averages": "running averages of many vectors as one",
    "kept-values-again": "values made again in the backward pass where that is one pass",
    "line-in-one-pass": "lines and normalised rows by operators for normalisation, not two passes",
    "loss-by-rows": "the scores of a large vocabulary for some rows at a time, in a loop",
    "mask-without-infinity": "rows that are masked as a whole set to zero behind attention",
    "masks-by-cast": "what is not zero by a cast, not by a comparison",
    "maxpool-indices": "the places of maxima by a second pooling",
    "means-by-matmul": "means over rows as products with a vector",
    "packed-parts": "weights of few bits unpacked by operators on bytes, and plain products",
    "pooled-copies": "sums over copies of a position by the kernel that pools",
    "repeated-channels": "numbers per channel repeated for each of few positions",
    "rotary-operator": "rotation of features by its own operator, if the file is of its opset",
    "row-sums-in-product": "what is subtracted from the rows of a wide product inside of it",
    "rows-in-one-axis": "batch and sequence joined to one axis between the views that need them",
    "scale-after-matmul": "a scale of rows behind the product instead of in front of it",
    "scale-in-weights": "a scale of channels in the weights that they meet, if these are smaller",
    "scatter-by-elements": "rows added to tables by products, or an index for each element",
    "several-steps": "several steps of a small model in one call",
    "slope-of-scores": "cross entropy's gradient rounded before the labels are marked in it",
    "slopes-by-table": "slopes of activations in bfloat16 out of a table",
    "split-qkv": "queries, keys and values cut out where they lie",
    "split-reductions": "sums over axes with a gap between them in two steps",
    "statistics-by-layer-norm": "mean and variance of a batch out of those of its images",
    "sum-in-product": "products of matrices that start from what would be added to them",
    "sum-operator": "three or more tensors added by one operator",
    "sums-in-float32": "sums of 16-bit numbers over many rows in float32",
    "sums-over-heads": "row sums of attention's gradient over heads; recomputation rounds anew",
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
_CPU_FORMS = PREFERS.keys() - {
    "aligned-classes",
    "aligned-keys",
    "attention-in-parts",
    "attention-operator",
    "bfloat16-images",
    "bias-apart",
    "column-sums-by-product",
    "few-operators",
    "fixed-masks",
    "flat-broadcasts",
    "float16-products",
    "gelu-operator",
    "given-means",
    "groups-by-layer-norm",
    "joined-averages",
    "kept-values-again",
    "line-in-one-pass",
    "mask-without-infinity",
    "masks-by-cast",
    "packed-parts",
    "pooled-copies",
    "row-sums-in-product",
    "scale-in-weights",
    "scatter-by-elements",
    "several-steps",
    "slope-of-scores",
    "slopes-by-table",
    "split-reductions",
    "statistics-by-layer-norm",
    "sum-operator",
    "sums-in-float32",
    "sums-over-heads",
}

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            "cpu",
            profile="ort-cpu",
            preferences=frozenset(_CPU_FORMS),
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
                    "affine-in-one-pass",
                    "aligned-classes",
                    "aligned-keys",
                    "attention-in-parts",
                    "attention-operator",
                    "bfloat16-images",
                    "bias-apart",
                    "column-sums-by-product",
                    "fixed-masks",
                    "flat-broadcasts",
                    "float16-products",
                    "gelu-operator",
                    "given-means",
                    "groups-by-layer-norm",
                    "joined-averages",
                    "kept-values-again",
                    "line-in-one-pass",
                    "mask-without-infinity",
                    "masks-by-cast",
                    "pooled-copies",
                    "row-sums-in-product",
                    "scale-after-matmul",
                    "scale-in-weights",
                    "scatter-by-elements",
                    "slope-of-scores",
                    "slopes-by-table",
                    "split-reductions",
                    "statistics-by-layer-norm",
                    "sum-operator",
                    "sums-in-float32",
                    "sums-over-heads",
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
                {"loss-by-rows", "means-by-matmul", "packed-parts", "several-steps"}
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
            preferences=frozenset({"few-operators", "mask-without-infinity", "means-by-matmul"}),
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
            preferences=frozenset({"means-by-matmul"}),
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
