"""Rules are formulas; what targets differ in is chosen from tables."""

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
from onnxtrain.autodiff.rules import batch_norm as batch_norm_forms
from onnxtrain.autodiff.rules import conv as channel_scale
from onnxtrain.losses import causal_lm, classification, metrics
from onnxtrain.losses import classification as binary
from onnxtrain.losses import classification as multi_margin
from onnxtrain.targets import find

SOURCE = Path(onnxtrain.__file__).parent
CHOOSERS = {"conv/conv.py": {"target"}, "conv/weight_grad.py": {"target"}}
"""Pass the target on to their table."""
FORMS = {"sum": Variant(len), "product": Variant(len, lambda n: n > 1), "gather": Variant(len)}
CHOICES = [
    Choice("gather", lacks="ScatterElements"),
    Choice("product", lambda n: n < 9, prefers="means-as-matmul"),
    Choice("sum"),
]


@pytest.mark.parametrize(
    ("target", "size", "form"),
    [
        ("wasm", 8, "product"),
        ("wasm", 1, "sum"),  # does not fit
        ("wasm", 9, "sum"),  # is not asked for
        ("cuda", 8, "sum"),  # is not preferred
        ("webgpu", 8, "gather"),  # what the others need is lacking
    ],
)
def test_the_first_that_is_wanted_and_fits(target: str, size: int, form: str) -> None:
    assert select_variant_name(find(target), size, FORMS, CHOICES) == form


@pytest.mark.parametrize("folder", ["autodiff/rules", "losses"])
def test_no_formula_asks_for_the_target(folder: str) -> None:
    asking = {}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        name = path.relative_to(SOURCE / folder).as_posix()
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        asked = {n.attr for n in nodes if n.attr in ("lacks", "prefers", "preferences", "missing")}
        asked |= {
            n.attr
            for n in nodes
            if n.attr == "target" and isinstance(n.value, ast.Name) and n.value.id == "op"
        }
        if asked:
            asking[name] = asked
    # The type of an input is no formula.
    assert asking == (
        CHOOSERS if folder == "autodiff/rules" else {"context.py": {"lacks", "target"}}
    )


def test_tables_name_forms_that_exist_and_end_with_one_for_all() -> None:
    tables = [
        (activations.GELU_VARIANTS, activations.GELU_CHOICES),
        (batch_norm.TRAINING_VARIANTS, batch_norm.TRAINING_CHOICES),
        (activations.POSITIVE_VARIANTS, activations.POSITIVE_CHOICES),
        (batch_norm_forms.STATISTICS_VARIANTS, batch_norm_forms.STATISTICS_CHOICES),
        (batch_norm_forms.BROADCAST_VARIANTS, batch_norm_forms.BROADCAST_CHOICES),
        (batch_norm_forms.DIFFERENCE_VARIANTS, batch_norm_forms.DIFFERENCE_CHOICES),
        (batch_norm_forms.GRADIENT_VARIANTS, batch_norm_forms.GRADIENT_CHOICES),
        (channel_scale.SCALE_VARIANTS, channel_scale.SCALE_CHOICES),
        (norm.MEANS_VARIANTS, norm.MEANS_CHOICES),
        (norm.INPUT_GRAD_VARIANTS, norm.INPUT_GRAD_CHOICES),
        (norm.RENORMALIZE_VARIANTS, norm.RENORMALIZE_CHOICES),
        (quantize.INPUT_GRAD_VARIANTS, quantize.INPUT_GRAD_CHOICES),
        (causal_lm.UNPACK_VARIANTS, causal_lm.UNPACK_CHOICES),
        (pool.POOLING_VARIANTS, pool.POOLING_CHOICES),
        (losses.WITHOUT_LABEL_VARIANTS, losses.BY_LABEL),
        (losses.AT_LABEL_VARIANTS, losses.BY_LABEL),
        (binary.SOFTPLUS_VARIANTS, binary.SOFTPLUS_CHOICES),
        (classification.CROSS_ENTROPY_VARIANTS, classification.CROSS_ENTROPY_CHOICES),
        (classification.COST_VARIANTS, classification.COST_CHOICES),
        (classification.NLL_VARIANTS, classification.NLL_CHOICES),
        (multi_margin.LEAD_VARIANTS, multi_margin.LEAD_CHOICES),
        (metrics.HIT_VARIANTS, metrics.HIT_CHOICES),
        *(
            (conv_weight.WEIGHT_GRAD_VARIANTS, choices)
            for choices in conv_weight.WEIGHT_GRAD_CHOICES.values()
        ),
        *((conv.INPUT_GRAD_VARIANTS, choices) for choices in conv.INPUT_GRAD_CHOICES.values()),
    ]
    for forms, choices in tables:
        names = [c.form for c in choices]
        assert set(names) <= forms.keys()
        last = choices[-1]
        assert (last.when, last.prefers, last.lacks) == (rule_registry.always, None, None)
        unused = forms.keys() - set(names)
        assert (
            forms is conv_weight.WEIGHT_GRAD_VARIANTS
            or forms is conv.INPUT_GRAD_VARIANTS
            or not unused
        )
