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
from onnxtrain.graph.memory import order_for_memory
from onnxtrain.graph.simplify import simplify
from onnxtrain.passes.absorb_norm_scale import absorb_norm_scale
from onnxtrain.passes.attention.aligned_keys import aligned_keys
from onnxtrain.passes.attention.attention_operator import attention_operator
from onnxtrain.passes.attention.fixed_masks import fixed_masks
from onnxtrain.passes.attention.long_attention import long_attention
from onnxtrain.passes.attention.open_rows import open_rows
from onnxtrain.passes.attention.parts_together import parts_together
from onnxtrain.passes.attention.row_sums_in_product import row_sums_in_product
from onnxtrain.passes.bias_as_weight_column import bias_as_weight_column
from onnxtrain.passes.conv_as_matmul import conv_as_matmul
from onnxtrain.passes.decompose_batch_norm import decompose_batch_norm
from onnxtrain.passes.dequantise_late import dequantise_late
from onnxtrain.passes.expand_label_losses import expand_label_losses
from onnxtrain.passes.fewer_nodes.mean_in_product import mean_in_product
from onnxtrain.passes.fewer_nodes.norm_slope import norm_slope
from onnxtrain.passes.fewer_nodes.row_sums_of_product import row_sums_of_product
from onnxtrain.passes.fewer_nodes.scale_in_rotation import scale_in_rotation
from onnxtrain.passes.fewer_nodes.scatter_into_sum import scatter_into_sum
from onnxtrain.passes.fewer_nodes.shared_slices import shared_slices
from onnxtrain.passes.fewer_nodes.sum_in_product import sum_in_product
from onnxtrain.passes.gemm_without_trans_a import gemm_without_trans_a
from onnxtrain.passes.gpu.aligned_classes import aligned_classes
from onnxtrain.passes.gpu.bias_apart import bias_apart
from onnxtrain.passes.gpu.column_sums_by_product import column_sums_by_product
from onnxtrain.passes.gpu.compose_missing import compose_missing
from onnxtrain.passes.gpu.flat_broadcasts import flat_broadcasts
from onnxtrain.passes.gpu.gelu_operator import gelu_operator
from onnxtrain.passes.gpu.group_norm_operator import group_norm_operator
from onnxtrain.passes.gpu.joined_averages import joined_averages
from onnxtrain.passes.gpu.make_again import make_again
from onnxtrain.passes.gpu.scatter_by_elements import scatter_by_elements
from onnxtrain.passes.gpu.slope_of_scores import slope_of_scores
from onnxtrain.passes.gpu.slopes_by_table import slopes_by_table
from onnxtrain.passes.gpu.split_reductions import split_reductions
from onnxtrain.passes.gpu.sums_at_once import sums_at_once
from onnxtrain.passes.gpu.sums_in_float32 import sums_in_float32
from onnxtrain.passes.gpu.tables_by_product import tables_by_product
from onnxtrain.passes.gpu.views_in_16_bits import views_in_16_bits
from onnxtrain.passes.int32_inputs import int32_inputs
from onnxtrain.passes.join_factors import join_factors
from onnxtrain.passes.maxpool_indices import maxpool_indices
from onnxtrain.passes.products_by_parts import products_by_parts
from onnxtrain.passes.relu_after_maxpool import relu_after_maxpool
from onnxtrain.passes.rotary_operator import rotary_operator
from onnxtrain.passes.rows_in_one_axis import rows_in_one_axis
from onnxtrain.passes.scale_after_matmul import scale_after_matmul
from onnxtrain.passes.split_long_sums import split_long_sums
from onnxtrain.passes.split_qkv import split_qkv
from onnxtrain.passes.swish_slope import swish_slope
from onnxtrain.targets import Target, find


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite and what it is for.

    Attributes:
        rewrite: changes a model in place; returns how often.
        lacks: only for targets that lack this.
        prefers: only for targets that prefer this.
        across_blocks: moves work over the borders of blocks that are computed again, so that it is
            left out where there are any.
    """

    rewrite: Callable[[ir.Model, OpBuilder], int]
    lacks: str | None = None
    prefers: str | None = None
    across_blocks: bool = False

    def wanted(self, target: Target, *, blocks: bool = False) -> bool:
        """Return whether the pass is for a target."""
        if blocks and self.across_blocks:
            return False
        if self.lacks is not None and not target.lacks(self.lacks):
            return False
        return self.prefers is None or target.prefers(self.prefers)


LAST = (Pass(slopes_by_table, prefers="slopes-by-table"),)
"""In front of :data:`FINAL`, on graphs that nobody differentiates again."""

INPUTS = (Pass(int32_inputs, lacks="int64"),)
"""For models whose callers follow a manifest: types of inputs."""

SPELLINGS = (
    Pass(gelu_operator, prefers="gelu-operator"),
    Pass(group_norm_operator, prefers="groups-by-layer-norm"),
    Pass(open_rows, prefers="mask-without-infinity"),
)
"""What exporters write out, recognised; part of :data:`BEFORE`, and before casts are put in."""

BEFORE = (
    *SPELLINGS,
    Pass(aligned_classes, prefers="aligned-classes"),
    Pass(aligned_keys, prefers="aligned-keys"),
    Pass(relu_after_maxpool),
    Pass(shared_slices),
    Pass(absorb_norm_scale, prefers="absorb-norm-scale", across_blocks=True),
    Pass(split_qkv, prefers="split-qkv", across_blocks=True),
    Pass(long_attention, prefers="attention-in-parts"),
)
"""On the forward graph, so that the reverse sweep sees the result."""

AFTER = (
    Pass(conv_as_matmul, prefers="conv-as-matmul"),
    Pass(maxpool_indices, prefers="maxpool-indices"),
    Pass(decompose_batch_norm, lacks="BatchNormalization.training_mode"),
    Pass(expand_label_losses),
    Pass(compose_missing),
    Pass(join_factors),
    Pass(swish_slope),
)
"""Behind the reverse sweep: the operators' own gradients are better than those of the results."""

FINAL = (
    Pass(fixed_masks, prefers="fixed-masks"),
    Pass(views_in_16_bits, prefers="float16-products"),
    Pass(row_sums_of_product, prefers="sums-over-heads"),
    Pass(scatter_into_sum),
    Pass(scale_after_matmul, prefers="scale-after-matmul"),
    Pass(gemm_without_trans_a, prefers="gemm-without-trans-a"),
    Pass(bias_as_weight_column, prefers="bias-as-weight-column"),
    Pass(split_long_sums),
    Pass(rotary_operator, prefers="rotary-operator"),
    Pass(scale_in_rotation, prefers="rotary-operator"),
    Pass(rows_in_one_axis, prefers="rows-in-one-axis"),
    Pass(sum_in_product, prefers="sum-in-product"),
    Pass(norm_slope, prefers="sum-in-product"),
    Pass(mean_in_product, prefers="sum-in-product"),
    Pass(products_by_parts, prefers="packed-parts"),
    Pass(dequantise_late),
    Pass(split_reductions, prefers="split-reductions"),
    Pass(joined_averages, prefers="joined-averages"),
    Pass(sums_in_float32, prefers="sums-in-float32"),
    Pass(slope_of_scores, prefers="slope-of-scores"),
    Pass(tables_by_product, prefers="scatter-by-elements"),
    Pass(scatter_by_elements, prefers="scatter-by-elements"),
    Pass(row_sums_in_product, prefers="row-sums-in-product"),
    Pass(column_sums_by_product, prefers="column-sums-by-product"),
    Pass(bias_apart, prefers="bias-apart"),
    Pass(parts_together, prefers="attention-in-parts"),
    Pass(make_again, prefers="kept-values-again"),
    Pass(attention_operator, prefers="attention-operator"),
    Pass(sums_at_once, prefers="sum-operator"),
    Pass(flat_broadcasts, prefers="flat-broadcasts"),
)
"""On the whole graph, once nothing more is added; simplified before, and again if one changed."""


def run(passes: Sequence[Pass], model: ir.Model, op: OpBuilder, *, blocks: bool = False) -> int:
    """Run the passes that are for the builder's target; return how much they changed."""
    return sum(p.rewrite(model, op) for p in passes if p.wanted(op.target, blocks=blocks))


def rewrite_inputs(model: ir.Model, target: str | Target) -> None:
    """Run :data:`INPUTS`, in place."""
    run(INPUTS, model, OpBuilder(model.graph, "input/", target=target))


def rewrite_spellings(model: ir.Model, target: str | Target) -> None:
    """Run :data:`SPELLINGS`, in place."""
    run(SPELLINGS, model, OpBuilder(model.graph, "form/", target=target))


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
    passes = (*LAST, *FINAL) if last else FINAL
    if any(p.wanted(target) for p in passes):
        op = OpBuilder(model.graph, f"{target.name}/", target=target)
        if run(passes, model, op):
            simplify(model)
    order_for_memory(model.graph)
    return model


__all__ = [
    "AFTER",
    "BEFORE",
    "FINAL",
    "INPUTS",
    "LAST",
    "SPELLINGS",
    "Pass",
    "rewrite_after",
    "rewrite_before",
    "rewrite_final",
    "rewrite_inputs",
    "rewrite_spellings",
    "run",
]
