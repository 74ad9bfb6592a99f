"""What happens to a graph besides differentiation, in order: the rewrites as data.

A pass is a function of a model and a builder over its graph that changes the model in place and
returns how often it did. An entry says for which targets: those that lack something, those that
prefer a form, or all. Every pass keeps the results and the names of the model's outputs.
"""

from __future__ import annotations

import dataclasses
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
    bias_as_weight_column,
    fold_norm_scale,
    fuse_matmul_add,
    fuse_mean_add,
    fuse_rms_norm_grad,
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


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite and what it is for.

    Attributes:
        rewrite: changes a model in place; returns how often.
        lacks: only for targets that lack this.
        prefers: only for targets that prefer this.
        across_recompute_blocks: moves work across the borders of recomputed blocks, so that it is
            left out where there are any.
    """

    rewrite: Callable[[ir.Model, OpBuilder], int]
    lacks: str | None = None
    prefers: str | None = None
    across_recompute_blocks: bool = False

    def wanted(self, target: Target, *, blocks: bool = False) -> bool:
        """Return whether the pass is for a target."""
        if blocks and self.across_recompute_blocks:
            return False
        if self.lacks is not None and not target.lacks(self.lacks):
            return False
        return self.prefers is None or target.prefers(self.prefers)


AFTER_LAST_GRADIENT = (Pass(gelu_grad_lookup_table, prefers="gelu-grad-lookup-table"),)
"""In front of :data:`FINAL`, on graphs that nobody differentiates again."""

INPUTS = (Pass(int32_inputs, lacks="int64"),)
"""For models whose callers follow a manifest: types of inputs."""

FUSIONS = (
    Pass(fuse_gelu, prefers="fuse-gelu"),
    Pass(fuse_group_norm, prefers="group-norm-via-layer-norm"),
    Pass(remove_nan_guard, prefers="remove-nan-guard"),
)
"""What exporters write out, recognised; part of :data:`BEFORE`, and before casts are put in."""

BEFORE = (
    *FUSIONS,
    Pass(pad_vocabulary, prefers="pad-vocabulary"),
    Pass(pad_attention_keys, prefers="pad-attention-keys"),
    Pass(move_relu_after_maxpool),
    Pass(deduplicate_slices),
    Pass(fold_norm_scale, prefers="fold-norm-scale", across_recompute_blocks=True),
    Pass(split_qkv, prefers="split-qkv", across_recompute_blocks=True),
    Pass(chunked_attention, prefers="chunked-attention"),
)
"""On the forward graph, so that the reverse sweep sees the result."""

AFTER = (
    Pass(conv_as_matmul, prefers="conv-as-matmul"),
    Pass(maxpool_indices, prefers="maxpool-indices"),
    Pass(decompose_batch_norm, lacks="BatchNormalization.training_mode"),
    Pass(expand_label_losses),
    Pass(decompose_unsupported),
    Pass(fold_scalar_factors),
    Pass(fuse_swish_grad),
)
"""Behind the reverse sweep: the operators' own gradients are better than those of the results."""

FINAL = (
    Pass(fold_constant_masks, prefers="fold-constant-masks"),
    Pass(remove_casts_around_views, prefers="float16-matmul"),
    Pass(row_sums_from_attention_output, prefers="row-sums-from-attention-output"),
    Pass(fuse_scatter_add),
    Pass(scale_after_matmul, prefers="scale-after-matmul"),
    Pass(gemm_without_trans_a, prefers="gemm-without-trans-a"),
    Pass(bias_as_weight_column, prefers="bias-as-weight-column"),
    Pass(split_long_sums),
    Pass(fuse_rotary_embedding, prefers="fuse-rotary-embedding"),
    Pass(fold_scale_into_rotary, prefers="fuse-rotary-embedding"),
    Pass(flatten_batch_dims, prefers="flatten-batch-dims"),
    Pass(fuse_matmul_add, prefers="fuse-matmul-add"),
    Pass(fuse_rms_norm_grad, prefers="fuse-matmul-add"),
    Pass(fuse_mean_add, prefers="fuse-matmul-add"),
    Pass(unpack_nbits_matmul, prefers="unpack-nbits-weights"),
    Pass(dequantize_at_use),
    Pass(split_noncontiguous_reductions, prefers="split-noncontiguous-reductions"),
    Pass(fuse_running_stats, prefers="fuse-running-stats"),
    Pass(accumulate_in_float32, prefers="accumulate-in-float32"),
    Pass(narrow_cross_entropy_grad, prefers="narrow-cross-entropy-grad"),
    Pass(scatter_add_as_matmul, prefers="scatter-nd-per-element"),
    Pass(scatter_nd_per_element, prefers="scatter-nd-per-element"),
    Pass(fold_row_subtraction, prefers="fold-row-subtraction"),
    Pass(column_sums_as_matmul, prefers="column-sums-as-matmul"),
    Pass(unfuse_gemm_bias, prefers="unfuse-gemm-bias"),
    Pass(group_attention_chunk_grads, prefers="chunked-attention"),
    Pass(rematerialize, prefers="rematerialize"),
    Pass(fuse_attention, prefers="fuse-attention"),
    Pass(fuse_add_chain, prefers="fuse-add-chain"),
    Pass(coalesce_broadcast_dims, prefers="coalesce-broadcast-dims"),
)
"""On the whole graph, once nothing more is added; simplified before, and again if one changed."""


def run(passes: Sequence[Pass], model: ir.Model, op: OpBuilder, *, blocks: bool = False) -> int:
    """Run the passes that are for the builder's target; return how much they changed."""
    return sum(p.rewrite(model, op) for p in passes if p.wanted(op.target, blocks=blocks))


def rewrite_inputs(model: ir.Model, target: str | Target) -> None:
    """Run :data:`INPUTS`, in place."""
    run(INPUTS, model, OpBuilder(model.graph, "input/", target=target))


def rewrite_fusions(model: ir.Model, target: str | Target) -> None:
    """Run :data:`SPELLINGS`, in place."""
    run(FUSIONS, model, OpBuilder(model.graph, "form/", target=target))


def rewrite_before(model: ir.Model, target: str | Target, *, blocks: bool = False) -> None:
    """Run :data:`BEFORE`, in place; ``blocks`` says whether some will be computed again."""
    run(BEFORE, model, OpBuilder(model.graph, "before/", target=target), blocks=blocks)


def rewrite_after(model: ir.Model, op: OpBuilder) -> None:
    """Run :data:`AFTER`, in place, with the builder of the reverse sweep."""
    run(AFTER, model, op)


def rewrite_final(model: ir.Model, target: str | Target, *, last: bool = False) -> ir.Model:
    """Simplify a model, run :data:`FINAL` and order its nodes, in place; return it.

    Args:
        model: of which everything is there.
        target: where it will run.
        last: nobody will differentiate it, so that :data:`LAST` is run, too.
    """
    simplify(model)
    target = find(target)
    passes = (*AFTER_LAST_GRADIENT, *FINAL) if last else FINAL
    if any(p.wanted(target) for p in passes):
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
