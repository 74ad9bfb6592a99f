"""The order of graph passes.

A pass is a function of a model and a builder over its graph. It changes the model in place and
returns how often it did; it keeps the values and names of the model's outputs. An entry says which
targets the pass is for, and the comment above it says what it needs before it and why it stands
there.

`python -m benchmarks.passes` measures every pass on whole training steps, on the CPU and with
`--target cuda` on a GPU; docs/speed.md has its tables. Where another command shows an effect, such
as memory, the comment names it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.memory_usage import order_for_memory
from onnxtrain.graph.simplify import simplify
from onnxtrain.optimize.attention_fusion import (
    fold_constant_masks,
    fold_row_subtraction,
    fuse_attention,
    remove_nan_guard,
    row_sums_from_attention_output,
    split_qkv,
)
from onnxtrain.optimize.convolution import conv_as_matmul, maxpool_indices, move_relu_after_maxpool
from onnxtrain.optimize.cross_entropy import (
    expand_label_losses,
    narrow_cross_entropy_grad,
    pad_vocabulary,
)
from onnxtrain.optimize.gelu_swish import fuse_gelu, fuse_swish_grad, gelu_grad_lookup_table
from onnxtrain.optimize.layout import (
    coalesce_broadcast_dims,
    deduplicate_slices,
    flatten_batch_dims,
    remove_casts_around_views,
)
from onnxtrain.optimize.long_attention import (
    chunked_attention,
    group_attention_chunk_grads,
    pad_attention_keys,
)
from onnxtrain.optimize.matmul import (
    gemm_without_trans_a,
    scale_after_matmul,
    unfuse_gemm_bias,
)
from onnxtrain.optimize.normalization import (
    decompose_batch_norm,
    fuse_group_norm,
    fuse_running_stats,
)
from onnxtrain.optimize.packed_weights import dequantize_at_use, unpack_nbits_matmul
from onnxtrain.optimize.recurrent import hoist_from_scans, unroll_scans
from onnxtrain.optimize.reductions import (
    accumulate_in_float32,
    column_sums_as_matmul,
    fold_scalar_factors,
    fuse_add_chain,
    split_long_sums,
    split_noncontiguous_reductions,
)
from onnxtrain.optimize.rematerialize import rematerialize
from onnxtrain.optimize.rotary_embedding import fold_scale_into_rotary, fuse_rotary_embedding
from onnxtrain.optimize.scatter import (
    fuse_scatter_add,
    scatter_add_as_matmul,
    scatter_nd_per_element,
)
from onnxtrain.optimize.target_types import decompose_unsupported, int32_inputs
from onnxtrain.targets import Target, find

LOGGER = logging.getLogger("onnxtrain.optimize")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite and the targets it is for.

    Attributes:
        rewrite: changes a model in place; returns how often.
        lacks: only for targets that lack this operator or type.
        prefers: only for targets with this preference.
        across_recompute_blocks: moves work across the borders of recomputed blocks; does not run
            where there are any.
    """

    rewrite: Callable[[ir.Model, OpBuilder], int]
    lacks: str | None = None
    prefers: str | None = None
    across_recompute_blocks: bool = False

    def runs_on(self, target: Target, *, blocks: bool = False) -> bool:
        """Return whether the pass is for a target; `blocks`: some blocks are recomputed."""
        if blocks and self.across_recompute_blocks:
            return False
        if self.lacks is not None and not target.lacks(self.lacks):
            return False
        return self.prefers is None or target.prefers(self.prefers)


INPUTS = (
    # Changes the signature, so only for models whose callers follow a manifest.
    Pass(int32_inputs, lacks="int64"),
)
"""Types of inputs."""

FUSIONS = (
    # First of all: needs the operators as the exporter wrote them. Mixed precision would put casts
    # between them, and differentiation would add readers to inner values. Rounds once in 16 bits.
    Pass(fuse_gelu, prefers="fuse-gelu"),
    # Likewise. GroupNormalization has a gradient rule with fewer passes than the parts have.
    Pass(fuse_group_norm, prefers="group-norm-via-layer-norm"),
    # Likewise. The guard's gradient is two more passes over all scores, and guarded scores do not
    # match the attention passes of BEFORE and FINAL.
    Pass(remove_nan_guard, prefers="remove-nan-guard"),
)
"""Operators that exporters decompose; part of :data:`BEFORE`, and before casts are inserted."""

BEFORE = (
    *FUSIONS,
    # Before differentiation, so that both matmuls of the gradient are padded, too.
    Pass(pad_vocabulary, prefers="pad-vocabulary"),
    # Likewise: four matmuls of the gradient read or write scores. After `remove_nan_guard`, because
    # it follows the scores through scales and masks only. Before `chunked_attention`, which copies
    # the padded nodes.
    Pass(pad_attention_keys, prefers="pad-attention-keys"),
    # Before differentiation, so that the gradient of the Relu is small, too. Needs a Relu with one
    # reader, which the gradient would add to.
    Pass(move_relu_after_maxpool),
    # Before differentiation: gradients of shared slices are written side by side, not padded and
    # added.
    Pass(deduplicate_slices),
    # Before differentiation: the gradient of Split is one Concat. Needs values with one reader.
    Pass(split_qkv, prefers="split-qkv", across_recompute_blocks=True),
    # Last: copies the nodes of attention once per chunk, and the gradient follows chunk by chunk.
    # Measured by memory: `python -m benchmarks.cuda.real --only whisper`.
    Pass(chunked_attention, prefers="chunked-attention"),
)
"""On the forward graph, so that differentiation works on the result."""

AFTER = (
    # The gradient rule of Scan saves few values and multiplies weight gradients once for all steps.
    Pass(hoist_from_scans, prefers="unroll-loops"),
    # First, so that the passes below see the nodes of the bodies.
    Pass(unroll_scans, prefers="unroll-loops"),
    # The gradient rule of Conv is faster than that of im2col and a matmul.
    Pass(conv_as_matmul, prefers="conv-as-matmul"),
    # The gradient rule of MaxPool is what reads Indices.
    Pass(maxpool_indices, prefers="maxpool-indices"),
    # The gradient rule of training-mode BatchNormalization is faster than that of its parts.
    Pass(decompose_batch_norm, lacks="BatchNormalization.training_mode"),
    # Likewise for the label losses. No stock runtime has kernels for them.
    Pass(expand_label_losses),
    # After the passes above, which still use some of the operators.
    Pass(decompose_unsupported),
    # After the expansions, whose constant factors meet those of the gradient.
    Pass(fold_scalar_factors),
    # After `fold_scalar_factors`: a factor between the two terms would hide the pattern.
    Pass(fuse_swish_grad),
)
"""After differentiation: gradient rules of operators are better than those of their expansions."""

AFTER_LAST_GRADIENT = (
    # Indices have no gradient, so not on graphs that may be differentiated again. First in FINAL's
    # run, while the derivative has the form that its rule gave it.
    Pass(gelu_grad_lookup_table, prefers="gelu-grad-lookup-table"),
)
"""Before :data:`FINAL`, on graphs that are not differentiated again."""

FINAL = (
    # First: attention passes below look for masks, and a mask of zeros no longer is one.
    Pass(fold_constant_masks, prefers="fold-constant-masks"),
    # After folding: passes that remove an operator leave pairs of casts. Before all passes that
    # look at the type or the producer of a matmul's operands.
    Pass(remove_casts_around_views, prefers="float16-matmul"),
    # Before `fold_row_subtraction`, which hides the softmax gradient inside a matmul, and before
    # `rematerialize`, which gives the gradient its own copy of the weights.
    Pass(row_sums_from_attention_output, prefers="row-sums-from-attention-output"),
    # Before `scatter_nd_per_element` and `scatter_add_as_matmul`, which replace what it matches.
    Pass(fuse_scatter_add),
    # Before `gemm_without_trans_a`: both rewrite the matmuls of the last layer, and this one
    # matches Gemm with transA.
    Pass(scale_after_matmul, prefers="scale-after-matmul"),
    Pass(gemm_without_trans_a, prefers="gemm-without-trans-a"),
    # Anywhere: only this one matches reductions over all axes. Measured by error, not time:
    # tests/optimize/test_split_long_sums.py.
    Pass(split_long_sums),
    # Before `flatten_batch_dims`, whose regions end at rank 4.
    Pass(fuse_rotary_embedding, prefers="fuse-rotary-embedding"),
    # Needs the nodes of `fuse_rotary_embedding`.
    Pass(fold_scale_into_rotary, prefers="fuse-rotary-embedding"),
    # After passes that match values by rank, such as the two above.
    Pass(flatten_batch_dims, prefers="flatten-batch-dims"),
    # Measured on wasm: `python -m benchmarks.web.finetune`.
    Pass(unpack_nbits_matmul, prefers="unpack-nbits-weights"),
    # After `unpack_nbits_matmul`, which unpacks at the point of use itself. Measured by memory:
    # `python -m benchmarks.finetune`.
    Pass(dequantize_at_use),
    # Before `accumulate_in_float32` and `column_sums_as_matmul`: they match sums over leading axes,
    # which its second steps are.
    Pass(split_noncontiguous_reductions, prefers="split-noncontiguous-reductions"),
    Pass(fuse_running_stats, prefers="fuse-running-stats"),
    # Before `column_sums_as_matmul`, which takes the sums that stay in 16 bits.
    Pass(accumulate_in_float32, prefers="accumulate-in-float32"),
    # Needs the expansion of label losses, and casts in their final place.
    Pass(narrow_cross_entropy_grad, prefers="narrow-cross-entropy-grad"),
    # Before `scatter_nd_per_element`: for small tables the matmul is faster.
    Pass(scatter_add_as_matmul, prefers="scatter-nd-per-element"),
    Pass(scatter_nd_per_element, prefers="scatter-nd-per-element"),
    # After `row_sums_from_attention_output`; before `coalesce_broadcast_dims`, which would rewrite
    # the subtraction.
    Pass(fold_row_subtraction, prefers="fold-row-subtraction"),
    # After `accumulate_in_float32`.
    Pass(column_sums_as_matmul, prefers="column-sums-as-matmul"),
    # After the passes that match Gemm. Before `coalesce_broadcast_dims`, for the new additions.
    Pass(unfuse_gemm_bias, prefers="unfuse-gemm-bias"),
    # Before `rematerialize`, which puts copies of scores before their first reader in the backward
    # pass: by then the gradients of one chunk have to be next to each other.
    Pass(group_attention_chunk_grads, prefers="chunked-attention"),
    # Needs to know what the backward pass reads, so after all passes that change that. Measured by
    # memory: `python -m benchmarks.cuda.real --only bert`.
    Pass(rematerialize, prefers="rematerialize"),
    # Needs scores with no readers but the forward pass, as `rematerialize` leaves them.
    Pass(fuse_attention, prefers="fuse-attention"),
    # After all passes that match additions. Before `coalesce_broadcast_dims`, which does not
    # rewrite Sum of equal shapes.
    Pass(fuse_add_chain, prefers="fuse-add-chain"),
    # Last: its views would hide operators from every other pass.
    Pass(coalesce_broadcast_dims, prefers="coalesce-broadcast-dims"),
)
"""On the complete graph, between two runs of `simplify`."""


def run(passes: Sequence[Pass], model: ir.Model, op: OpBuilder, *, blocks: bool = False) -> int:
    """Run the passes that are for the builder's target; return how many changes they made."""
    count = 0
    for p in passes:
        if p.runs_on(op.target, blocks=blocks):
            changed = p.rewrite(model, op)
            LOGGER.debug("%s: %d changes", p.rewrite.__name__, changed)
            count += changed
    return count


def rewrite_inputs(model: ir.Model, target: str | Target) -> None:
    """Run :data:`INPUTS`, in place."""
    run(INPUTS, model, OpBuilder(model.graph, "input/", target=target))


def rewrite_fusions(model: ir.Model, target: str | Target) -> None:
    """Run :data:`FUSIONS`, in place."""
    run(FUSIONS, model, OpBuilder(model.graph, "form/", target=target))


def rewrite_before(model: ir.Model, target: str | Target, *, blocks: bool = False) -> None:
    """Run :data:`BEFORE`, in place; `blocks`: some blocks will be recomputed."""
    run(BEFORE, model, OpBuilder(model.graph, "before/", target=target), blocks=blocks)


def rewrite_after(model: ir.Model, op: OpBuilder) -> None:
    """Run :data:`AFTER`, in place, with the builder that differentiated the model."""
    run(AFTER, model, op)


def rewrite_final(model: ir.Model, target: str | Target, *, last: bool = False) -> ir.Model:
    """Simplify a model, run :data:`FINAL` and order its nodes, in place; return it.

    Args:
        model: a complete model.
        target: the target that it will run on.
        last: the model will not be differentiated, so :data:`AFTER_LAST_GRADIENT` runs, too.
    """
    simplify(model)
    target = find(target)
    passes = (*AFTER_LAST_GRADIENT, *FINAL) if last else FINAL
    if any(p.runs_on(target) for p in passes):
        op = OpBuilder(model.graph, f"{target.name}/", target=target)
        if run(passes, model, op):
            simplify(model)
    order_for_memory(model.graph)
    return model


__all__ = [
    "AFTER",
    "AFTER_LAST_GRADIENT",
    "BEFORE",
    "FINAL",
    "FUSIONS",
    "INPUTS",
    "Pass",
    "rewrite_after",
    "rewrite_before",
    "rewrite_final",
    "rewrite_fusions",
    "rewrite_inputs",
    "run",
]
