"""Sizes at which forms change: all in one file, each measured by one command."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from benchmarks.threshold_nets import CASES, NOT_MEASURED
from benchmarks.thresholds import Point

import onnxtrain
from benchmarks import thresholds as command
from onnxtrain import thresholds

SOURCE = Path(onnxtrain.__file__).parent
NAMES = [n for n in vars(thresholds) if n.isupper()]
NO_SIZES = {
    "optimize/convolution.py:_EXACT": "whole numbers that float32 holds",
    "autodiff/rules/pool.py:_EXACT": "whole numbers that float32 holds",
    "optimize/cross_entropy.py:_TINY": "a probability",
    "autodiff/rules/activations.py:_DENSITY": "a logarithm of the normal distribution",
    "autodiff/recompute.py:REREAD_COST": "weighs time against memory",
    "autodiff/recompute.py:_END": "a place in a network",
    "autodiff/recompute.py:_START": "a place in a network",
    "autodiff/recompute.py:_UNKNOWN_DIM_SAVED_SIZE": "assumed size of a symbolic dim",
    "autodiff/recompute.py:_UNKNOWN_DIM_SIZE": "what a symbolic size counts as in an estimate",
    "autodiff/rules/elementwise.py:_RELU6": "bounds of an operator",
    "autodiff/rules/grid_sample.py:_A": "a coefficient of cubic interpolation",
    "autodiff/rules/grid_sample.py:_CUBIC": "coefficients of cubic interpolation",
    "autodiff/selection.py:_OFFSET": "the place of an input",
    "autodiff/rules/movement.py:_END": "the end of an axis",
    "autodiff/differentiate.py:_SHOWN": "how many names a message lists",
    "autodiff/rules/pool.py:_TABLE": "bounds the size of a constant",
    "autodiff/rules/quantize.py:_BIAS": "the place of an input",
    "autodiff/rules/quantize.py:_BITS": "what kernels unpack",
    "autodiff/rules/quantize.py:_RANGES": "the ranges of types",
    "optimize/matmul.py:_FEWEST": "nodes that are saved against nodes added",
    "optimize/rotary_embedding.py:_INPUTS": "the number of inputs",
    "optimize/packed_weights.py:_INPUTS": "the number of inputs",
    "optimize/cross_entropy.py:_MASKED_LOGIT": "a score",
    "optimize/cross_entropy.py:_ALIGNMENT": "how many numbers a kernel reads at once",
    "optimize/long_attention.py:_MASKED_SCORE": "a score",
    "optimize/long_attention.py:_ALIGNMENT_BITS": "how many bits a kernel reads at once",
    "optimize/matmul.py:_MOST_ROWS": "bounds the size of a constant",
    "optimize/gelu_swish.py:_GELU_BY_TANH": "values of a function",
    "optimize/gelu_swish.py:_DEPTH": "how far is looked",
    "optimize/gelu_swish.py:_ERF": "a function",
    "optimize/gelu_swish.py:_GELU_BY_ERF": "values of a function",
    "optimize/gelu_swish.py:_GRID": "where a function is evaluated",
    "autodiff/rules/norm.py:_MOST_ROWS": "what a kernel can start at once",
    "optimize/reductions.py:_WORD": "how many numbers a kernel reads at once",
    "optimize/gelu_swish.py:_BOUND": "values of a function",
    "optimize/gelu_swish.py:_IDENTITY_STEPS": "values of a function",
    "optimize/gelu_swish.py:_STEPS": "where a function is evaluated",
    "optimize/reductions.py:_FEWEST": "operands of a sum",
    "optimize/reductions.py:_MOST": "operands that a kernel takes",
    "optimize/reductions.py:_MAX_DISTANCE": "how far is looked",
    "optimize/rematerialize.py:_UNKNOWN_DIM_SIZE": "what a symbolic size counts as",
    "optimize/attention_fusion.py:_MASKED_SCORE": "a score",
    "optimize/attention_fusion.py:_UNMASKED_SCORE": "a score",
    "optimize/attention_fusion.py:_ALIGNMENT": "how many numbers a kernel reads at once",
    "optimize/rotary_embedding.py:_IR_VERSION": "a version of the format",
    "optimize/rotary_embedding.py:_SINCE": "a version of the standard",
    "optimize/layout.py:_MAX_QUERIED_SIZES": "how many nodes a computed shape takes",
    "optimize/reductions.py:LONG_REDUCTION_ELEMENTS": "bounds an error",
    "optimize/reductions.py:_FEW": "bounds an error",
    "optimize/reductions.py:_SEVERAL": "bounds an error",
    "optimize/reductions.py:_WORTHWHILE": "bounds an error",
}
"""Numbers in capitals that choose between no forms."""


def test_every_threshold_is_measured_or_says_why_not() -> None:
    assert sorted(NAMES) == sorted([*CASES, *NOT_MEASURED])


def test_every_threshold_says_what_happens_at_it_and_what_measures_it() -> None:
    body = ast.parse(Path(thresholds.__file__).read_text()).body
    texts = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            name, text = node.targets[0], after.value
            assert isinstance(name, ast.Name)
            assert isinstance(text, ast.Constant)
            texts[name.id] = str(text.value)
    assert list(texts) == NAMES
    for name in CASES:
        assert texts[name].rstrip().endswith(f"``python -m benchmarks.thresholds {name}``")


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is made of numbers alone, such as ``1 << 18`` or ``(2000, 512)``."""
    leaves = [n for n in ast.walk(node) if not list(ast.iter_child_nodes(n))]
    numbers = [n for n in leaves if isinstance(n, ast.Constant)]
    context = (ast.operator, ast.unaryop, ast.expr_context)
    return (
        bool(numbers)
        and all(isinstance(n.value, int | float) for n in numbers)
        and all(isinstance(n, (ast.Constant, *context)) for n in leaves)
    )


def test_no_other_module_has_sizes_of_its_own() -> None:
    numbers = set()
    for folder in ("passes", "autodiff", "graph/windows"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and _is_number(node.value):
                    targets = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
                    name = path.relative_to(SOURCE).as_posix()
                    numbers |= {f"{name}:{t}" for t in targets if t.isupper()}
    assert numbers == NO_SIZES.keys()


def test_no_form_is_chosen_by_a_number_without_a_name() -> None:
    compared = []
    for folder in ("passes", "autodiff/rules", "graph/windows"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            for node in (n for n in nodes if isinstance(n, ast.Compare)):
                numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                if any(isinstance(n, int | float) and n > 4 for n in numbers):
                    compared.append(f"{path.name}: {ast.unparse(node)}")
    assert compared == []


@pytest.mark.parametrize("name", CASES)
def test_nets_lie_on_both_sides_and_meet_the_choice(name: str) -> None:
    case, value = CASES[name], getattr(thresholds, name)
    sizes = list(case.nets)
    assert sizes == sorted(sizes)
    assert sizes[0] < value < sizes[-1]
    assert value in sizes
    first, second = command.trainers(name, case, case.nets[sizes[0]]())
    assert first.step_models != second.step_models
    assert getattr(thresholds, name) == value


def test_a_net_without_the_choice_is_refused() -> None:
    case = CASES["REPEATED_POSITIONS"]
    net = CASES["NARROW_CHANNELS"].nets[4]()
    with pytest.raises(ValueError, match="REPEATED_POSITIONS: the net has the same step"):
        command.trainers("REPEATED_POSITIONS", case, net)


def test_the_table_has_a_row_for_each_size() -> None:
    name = "REPEATED_POSITIONS"
    points = [command.measure(name, s, rounds=1, seconds=0.001) for s in CASES[name].nets]
    head, marks, *rows = command.table({name: points}).splitlines()
    assert head.startswith(
        "| threshold | its form is used | crosses 1 there | size | with it, ms |"
    )
    assert marks.count("---") == head.count("|") - 1 == 7
    assert [r.split(" | ")[3] for r in rows] == ["16", "32", "64"]
    assert rows[0].startswith(f"| `{name}` | up to 32 positions |")
    ratio = float(rows[0].split(" | ")[6].split()[0])
    assert ratio == pytest.approx(points[0].used[0] / points[0].unused[0], abs=0.006)


@pytest.mark.parametrize(
    ("side", "ratios", "said"),
    [
        ("up to", (0.8, 0.9, 1.1), "yes"),
        ("up to", (0.8, 1.04, 0.96), "within noise"),
        ("up to", (1.0, 1.04, 1.1), "within noise"),
        ("up to", (0.98, 1.04, 0.96), "no difference"),
        ("up to", (0.8, 1.2, 1.3), "**no**: costs at 8"),
        ("up to", (0.8, 0.7, 0.6), "**no**: would pay at 16"),
        ("below", (0.8, 1.2, 1.3), "yes"),
        ("from", (1.2, 0.9, 0.8), "yes"),
        ("from", (0.8, 1.1, 0.9), "**no**: costs at 8, would pay at 4"),
    ],
)
def test_verdicts(side: str, ratios: tuple[float, ...], said: str) -> None:
    points = [Point(s, [r], [1.0]) for s, r in zip((4, 8, 16), ratios, strict=True)]
    assert command.verdict(side, 8, points) == said
