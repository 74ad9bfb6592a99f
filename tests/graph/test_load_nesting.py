"""Scopes, subgraphs and local functions that `load` must reject."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxtrain.graph.io import Limits, load
from tests.graph import small_models as small
from tests.graph.refusals import first_line, refusal
from tests.graph.small_models import parse

TWICE = "values that are defined twice"
DEEP = "subgraphs or function calls nested deeper than the limit"


@pytest.mark.parametrize("depth", [33, 34, 200, 3000])
def test_nested_if_bomb(depth: int, tmp_path: Path) -> None:
    model = small.nested_ifs(depth)
    assert first_line(refusal(model, tmp_path)) == f"ModelProto: {DEEP}"
    data = model.SerializeToString()
    assert first_line(refusal(data, tmp_path)) == f"bytes: {DEEP}"
    assert len(load(small.nested_ifs(32)).graph) == 1


def test_nested_if_bomb_in_memory(tmp_path: Path) -> None:
    model = ir.from_proto(small.nested_ifs(40))
    assert first_line(refusal(model, tmp_path)) == f"ir.Model: {DEEP}"


def test_too_many_nodes(tmp_path: Path) -> None:
    model = parse(small.BRANCHES)
    text = refusal(model, tmp_path, limits=Limits(nodes=3))
    assert first_line(text) == "ModelProto: more nodes than the limit"
    text = refusal(ir.from_proto(model), tmp_path, limits=Limits(nodes=3))
    assert first_line(text) == "ir.Model: more nodes than the limit"


def chain_of_functions(count: int, calls: int) -> onnx.ModelProto:
    """Return a model whose functions each call the next one ``calls`` times."""
    model = parse(small.FUNCTION)
    model.functions[0].name = f"f{count}"
    model.graph.node[0].op_type = "f0"
    for index in range(count):
        body = model.functions.add(name=f"f{index}", domain="local", input=["a0"])
        body.opset_import.add(domain="local", version=1)
        for call in range(calls):
            body.node.add(
                op_type=f"f{index + 1}", domain="local", input=[f"a{call}"], output=[f"a{call + 1}"]
            )
        body.output.append(f"a{calls}")
    return model


def test_functions_that_grow_exponentially_when_inlined(tmp_path: Path) -> None:
    load(chain_of_functions(10, 2))
    text = refusal(chain_of_functions(25, 2), tmp_path)
    assert first_line(text) == "ModelProto: more nodes than the limit"
    assert "once the local functions are inlined" in text
    assert first_line(refusal(chain_of_functions(500, 1), tmp_path)) == f"ModelProto: {DEEP}"


def test_recursive_functions(tmp_path: Path) -> None:
    model = chain_of_functions(3, 1)
    model.functions[-1].node[0].op_type = "f0"
    text = refusal(model, tmp_path)
    assert first_line(text) == "ModelProto: local functions that call themselves"
    assert "local::f0" in text


def test_undefined_function_of_a_known_domain(tmp_path: Path) -> None:
    model = parse(small.FUNCTION)
    model.graph.node[0].op_type = "thrice"
    assert first_line(refusal(model, tmp_path)) == "ModelProto: operators of unknown domains"


def test_a_subgraph_in_a_cycle_with_its_node(tmp_path: Path) -> None:
    model = parse(small.BRANCHES)
    model.graph.node[1].attribute[1].g.node[0].input[0] = "y"
    assert first_line(refusal(model, tmp_path)) == "ModelProto: a cycle in the graph"


def test_a_subgraph_cannot_see_its_sibling(tmp_path: Path) -> None:
    model = parse(small.BRANCHES)
    model.graph.node[1].attribute[1].g.node[0].input[0] = "k"
    text = refusal(model, tmp_path)
    assert first_line(text) == "ModelProto: node inputs that nothing defines"
    assert "in node of 'y' (If), else_branch: 'k' of node of 'b' (Identity)" in text


def test_a_subgraph_cannot_redefine_an_outer_value(tmp_path: Path) -> None:
    model = parse(small.BRANCHES)
    branch = model.graph.node[1].attribute[1].g
    branch.node[0].output[0] = branch.output[0].name = "h"
    assert first_line(refusal(model, tmp_path)) == f"ModelProto: {TWICE}"


def test_an_ir_model_that_uses_a_foreign_value(tmp_path: Path) -> None:
    model, other = load(parse(small.LINEAR)), load(parse(small.LINEAR))
    model.graph[0].replace_input_with(0, other.graph.inputs[0])  # also called 'x'
    text = refusal(model, tmp_path)
    assert first_line(text) == "ir.Model: node inputs that nothing defines"


def test_an_ir_model_with_a_cycle(tmp_path: Path) -> None:
    model = load(parse(small.LINEAR))
    model.graph[0].replace_input_with(0, model.graph[1].outputs[0])
    assert first_line(refusal(model, tmp_path)) == "ir.Model: a cycle in the graph"


def test_an_ir_model_without_data(tmp_path: Path) -> None:
    model = load(parse(small.LINEAR))
    model.graph.initializers["w"].const_value = None
    assert first_line(refusal(model, tmp_path)) == "ir.Model: initializers without data"
