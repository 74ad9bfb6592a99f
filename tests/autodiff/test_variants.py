"""Rules are formulas; what targets differ in is chosen from tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import onnxtrain
from onnxtrain.autodiff import variants
from onnxtrain.autodiff.rules import (
    activations,
    batch_norm,
    batch_norm_forms,
    losses,
    max_pool,
    norm,
    packed_weights,
)
from onnxtrain.autodiff.rules.conv import channel_scale, conv, weight_grad
from onnxtrain.autodiff.variants import Choice, Form, pick
from onnxtrain.losses import binary, classification, metrics, multi_margin, vocabulary_loop
from onnxtrain.targets import find

SOURCE = Path(onnxtrain.__file__).parent
CHOOSERS = {"conv/conv.py": {"target"}, "conv/weight_grad.py": {"target"}}
"""Pass the target on to their table."""
FORMS = {"sum": Form(len), "product": Form(len, lambda n: n > 1), "gather": Form(len)}
CHOICES = [
    Choice("gather", lacks="ScatterElements"),
    Choice("product", lambda n: n < 9, prefers="means-by-matmul"),
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
    assert pick(find(target), size, FORMS, CHOICES) == form


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
        (activations.GELU_FORMS, activations.GELU_CHOICES),
        (batch_norm.TRAINING_FORMS, batch_norm.TRAINING_CHOICES),
        (activations.POSITIVE_FORMS, activations.POSITIVE_CHOICES),
        (batch_norm_forms.STATISTICS_FORMS, batch_norm_forms.STATISTICS_CHOICES),
        (batch_norm_forms.SPREAD_FORMS, batch_norm_forms.SPREAD_CHOICES),
        (batch_norm_forms.DIFFERENCE_FORMS, batch_norm_forms.DIFFERENCE_CHOICES),
        (batch_norm_forms.GRADIENT_FORMS, batch_norm_forms.GRADIENT_CHOICES),
        (channel_scale.SCALE_FORMS, channel_scale.SCALE_CHOICES),
        (norm.MEANS_FORMS, norm.MEANS_CHOICES),
        (norm.SLOPE_FORMS, norm.SLOPE_CHOICES),
        (norm.AGAIN_FORMS, norm.AGAIN_CHOICES),
        (packed_weights.INPUT_FORMS, packed_weights.INPUT_CHOICES),
        (vocabulary_loop.WORD_FORMS, vocabulary_loop.WORD_CHOICES),
        (max_pool.POOLING_FORMS, max_pool.POOLING_CHOICES),
        (losses.WITHOUT_LABEL_FORMS, losses.BY_LABEL),
        (losses.AT_LABEL_FORMS, losses.BY_LABEL),
        (binary.SOFTPLUS_FORMS, binary.SOFTPLUS_CHOICES),
        (classification.CROSS_ENTROPY_FORMS, classification.CROSS_ENTROPY_CHOICES),
        (classification.COST_FORMS, classification.COST_CHOICES),
        (classification.NLL_FORMS, classification.NLL_CHOICES),
        (multi_margin.LEAD_FORMS, multi_margin.LEAD_CHOICES),
        (metrics.HIT_FORMS, metrics.HIT_CHOICES),
        *((weight_grad.FORMS, choices) for choices in weight_grad.CHOICES.values()),
        *((conv.INPUT_FORMS, choices) for choices in conv.INPUT_CHOICES.values()),
    ]
    for forms, choices in tables:
        names = [c.form for c in choices]
        assert set(names) <= forms.keys()
        last = choices[-1]
        assert (last.when, last.prefers, last.lacks) == (variants.always, None, None)
        unused = forms.keys() - set(names)
        assert forms is weight_grad.FORMS or forms is conv.INPUT_FORMS or not unused
