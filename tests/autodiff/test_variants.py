"""Gradient rules select per-target variants from tables; they do not query the target."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import onnxtrain
from onnxtrain.autodiff import rule_registry
from onnxtrain.autodiff.rule_registry import Choice, Variant, select_variant_name
from onnxtrain.autodiff.rules import (
    activations,
    batch_norm,
    conv,
    conv_weight,
    losses,
    norm,
    pool,
    quantize,
)
from onnxtrain.losses import causal_lm, classification, metrics
from onnxtrain.targets import find

SOURCE = Path(onnxtrain.__file__).parent
# Files that pass the target to their table.
CHOOSERS = {"conv.py": {"target"}, "conv_weight.py": {"target"}}
VARIANTS = {"sum": Variant(len), "product": Variant(len, lambda n: n > 1), "gather": Variant(len)}
CHOICES = [
    Choice("gather", lacks="ScatterElements"),
    Choice("product", lambda n: n < 9, prefers="means-as-matmul"),
    Choice("sum"),
]


@pytest.mark.parametrize(
    ("target", "size", "variant"),
    [
        ("wasm", 8, "product"),
        ("wasm", 1, "sum"),  # the product variant does not apply
        ("wasm", 9, "sum"),  # the condition of the product choice is false
        ("cuda", 8, "sum"),  # cuda does not prefer the product
        ("webgpu", 8, "gather"),  # webgpu lacks ScatterElements
    ],
)
def test_the_first_applicable_choice_is_selected(target: str, size: int, variant: str) -> None:
    assert select_variant_name(find(target), size, VARIANTS, CHOICES) == variant


@pytest.mark.parametrize("folder", ["autodiff/rules", "losses"])
def test_rules_do_not_query_the_target(folder: str) -> None:
    queries = {}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        name = path.relative_to(SOURCE / folder).as_posix()
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        attributes = {
            n.attr for n in nodes if n.attr in ("lacks", "prefers", "preferences", "missing")
        }
        attributes |= {
            n.attr
            for n in nodes
            if n.attr == "target" and isinstance(n.value, ast.Name) and n.value.id == "op"
        }
        if attributes:
            queries[name] = attributes
    # losses/attach.py chooses the type of graph inputs, which depends on the target.
    assert queries == (
        CHOOSERS if folder == "autodiff/rules" else {"attach.py": {"lacks", "target"}}
    )


def test_tables_name_existing_variants_and_end_with_a_fallback() -> None:
    tables = [
        (activations.GELU_VARIANTS, activations.GELU_CHOICES),
        (batch_norm.TRAINING_VARIANTS, batch_norm.TRAINING_CHOICES),
        (activations.POSITIVE_VARIANTS, activations.POSITIVE_CHOICES),
        (batch_norm.STATISTICS_VARIANTS, batch_norm.STATISTICS_CHOICES),
        (batch_norm.BROADCAST_VARIANTS, batch_norm.BROADCAST_CHOICES),
        (batch_norm.DIFFERENCE_VARIANTS, batch_norm.DIFFERENCE_CHOICES),
        (batch_norm.GRADIENT_VARIANTS, batch_norm.GRADIENT_CHOICES),
        (conv.SCALE_VARIANTS, conv.SCALE_CHOICES),
        (norm.MEANS_VARIANTS, norm.MEANS_CHOICES),
        (norm.INPUT_GRAD_VARIANTS, norm.INPUT_GRAD_CHOICES),
        (norm.RENORMALIZE_VARIANTS, norm.RENORMALIZE_CHOICES),
        (quantize.INPUT_GRAD_VARIANTS, quantize.INPUT_GRAD_CHOICES),
        (causal_lm.UNPACK_VARIANTS, causal_lm.UNPACK_CHOICES),
        (pool.POOLING_VARIANTS, pool.POOLING_CHOICES),
        (losses.WITHOUT_LABEL_VARIANTS, losses.BY_LABEL),
        (losses.AT_LABEL_VARIANTS, losses.BY_LABEL),
        (classification.SOFTPLUS_VARIANTS, classification.SOFTPLUS_CHOICES),
        (classification.CROSS_ENTROPY_VARIANTS, classification.CROSS_ENTROPY_CHOICES),
        (classification.COST_VARIANTS, classification.COST_CHOICES),
        (classification.NLL_VARIANTS, classification.NLL_CHOICES),
        (classification.LABEL_SCORE_VARIANTS, classification.LABEL_SCORE_CHOICES),
        (metrics.HIT_VARIANTS, metrics.HIT_CHOICES),
        *(
            (conv_weight.WEIGHT_GRAD_VARIANTS, choices)
            for choices in conv_weight.WEIGHT_GRAD_CHOICES.values()
        ),
        *((conv.INPUT_GRAD_VARIANTS, choices) for choices in conv.INPUT_GRAD_CHOICES.values()),
    ]
    for variants, choices in tables:
        names = [c.variant for c in choices]
        assert set(names) <= variants.keys()
        last = choices[-1]
        assert (last.when, last.prefers, last.lacks) == (rule_registry.always, None, None)
        unused = variants.keys() - set(names)
        assert (
            variants is conv_weight.WEIGHT_GRAD_VARIANTS
            or variants is conv.INPUT_GRAD_VARIANTS
            or not unused
        )
