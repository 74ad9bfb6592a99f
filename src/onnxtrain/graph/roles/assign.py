"""Roles for the tensors of a model, and weights that are no initializers made into some."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.roles.flow import float_tensors
from onnxtrain.graph.roles.judge import Judge, tensor_of
from onnxtrain.graph.roles.role import Role, constant, parameter
from onnxtrain.graph.roles.table import STATISTIC

PARAMETERS = "onnxtrain.parameters"
"""Key in a model's metadata: the names of its parameters, where their maker knows them."""
FROZEN = "onnxtrain.frozen"
"""Key in a model's metadata: the names of parameters that do not train unless somebody says so."""
ADAPTERS = "onnxtrain.adapters"
"""Key in a model's metadata: what its adapters are called elsewhere, if it has any; JSON."""

_FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)
_KNOWN = parameter("parameter", "a parameter, as the maker of the file says")
_OTHER = constant("no parameter, as the maker of the file says")
_STILL = constant("frozen, as the maker of the file says", _KNOWN.kind)
_EMPTY = constant("an empty tensor")


def lift_weights(model: ir.Model) -> list[str]:
    """Make initializers of weights in Constant nodes and in bodies, in place; return their names.

    Running statistics go with them; what is neither stays where it is.
    """
    graph = model.graph
    if _is_listed(model):
        return []
    judge = Judge(graph)
    own = set(graph.initializers.values())
    hidden = [
        x
        for x in float_tensors(graph)
        if x not in own and _is_float(x) and _is_state(judge.role(x))
    ]
    if not hidden:
        return []
    uses = Counter(y.name for n in graph.all_nodes() for y in n.outputs)
    uses.update(x.name for x in graph.inputs)
    uses.update(x.name for x in float_tensors(graph) if x.producer() is None)
    return [_lift(graph, x, uses) for x in hidden]


def roles(model: ir.Model) -> dict[str, Role]:
    """Return the role of every float initializer of the main graph, by name.

    A list of parameters in the file decides. If some of its names are gone, a tool has changed the
    file since: what is still called by a listed name is a parameter, and use tells of the rest.
    """
    floats = {n: x for n, x in model.graph.initializers.items() if _is_float(x)}
    listed, frozen = _listed(model) or set(), _listed(model, FROZEN) or set()
    other = {n: _EMPTY for n, x in floats.items() if x.shape is not None and 0 in x.shape}
    if _is_listed(model):
        found = {n: _KNOWN if n in listed else _OTHER for n in floats}
    else:
        judge = Judge(model.graph)
        found = {n: _KNOWN if n in listed else judge.role(x) for n, x in floats.items()}
    return found | {n: _STILL for n in frozen if n in found and found[n].trains} | other


def kinds_by_use(model: ir.Model, known: Mapping[str, Role]) -> dict[str, str]:
    """Return the kind of every float initializer by its use, also of those that a list names."""
    judge: Judge | None = None
    kinds = {}
    for name, role in known.items():
        if role.kind == _KNOWN.kind:
            judge = judge or Judge(model.graph)
            role = judge.role(model.graph.initializers[name])
        kinds[name] = role.kind
    return kinds


def _is_listed(model: ir.Model) -> bool:
    """Return whether the file lists its parameters, and has all of them."""
    listed = _listed(model)
    return listed is not None and listed <= model.graph.initializers.keys()


def _listed(model: ir.Model, key: str = PARAMETERS) -> set[str] | None:
    """Return the parameters that the file itself lists, ``None`` if it lists none."""
    text = model.metadata_props.get(key)
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrepareError(f"the metadata {key!r} of the model is damaged: {error}") from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise PrepareError(f"the metadata {key!r} of the model is damaged: a list of names")
    return set(names)


def _is_state(role: Role) -> bool:
    """Return whether training may change what has the role."""
    return role.trains or role is STATISTIC


def _is_float(value: ir.Value) -> bool:
    tensor = tensor_of(value)
    return tensor is not None and tensor.dtype in _FLOATS


def _lift(graph: ir.Graph, old: ir.Value, uses: Counter[str | None]) -> str:
    """Put a new initializer in the place of a hidden tensor; return its name."""
    tensor = tensor_of(old)
    assert tensor is not None
    node, base, n = old.producer(), old.name or "weight", 2
    home = old.graph if node is None else node.graph
    name = base
    if uses[base] > 1:  # two bodies may call what is theirs by one name
        while uses[name]:
            name, n = f"{base}.{n}", n + 1
        uses[name] += 1
    new = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if node is not None:
        assert isinstance(home, ir.Graph)
        old.name = f"{name}.lifted"
        home.remove(node, safe=True)
    elif isinstance(home, ir.Graph):
        home.initializers.pop(old.name or "", None)
    graph.register_initializer(new)
    return name
