"""The checks of every op case. Each raises if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx

import onnxtrain
from onnxtrain import targets as table
from onnxtrain.importer.opset import NEWEST_IR, NEWEST_OPSET
from tests.cases.base import OpCase
from tests.cases.coverage import how
from tests.cases.evaluate import Arrays, assert_close, is_float, oracle_of, reference, stock

TARGETS = [name for name in table.TARGETS if name != "cpu"]


@dataclass(frozen=True)
class Gradient:
    """A built gradient model and what it was built from."""

    model: onnx.ModelProto
    vjp: onnx.ModelProto
    cotangents: list[str]  # the float outputs, in order
    wrt: list[str]

    @property
    def split(self) -> int:
        """How many of the outputs belong to the model; gradients follow."""
        return len(self.model.graph.output)


@cache
def gradient(
    case: OpCase, double: bool = False, dynamic: str = "", target: str = "cpu"
) -> Gradient:
    """The gradient model of a case, built once per session."""
    model = case.build(double, dynamic)
    outputs = [v.name for v in model.graph.output if is_float(v)]
    vjp = onnxtrain.vjp(model, case.wrt, outputs, target=target)
    return Gradient(model, vjp, outputs, case.wrt)


@cache
def second_gradient(case: OpCase, double: bool = False) -> Gradient:
    """The gradient of the gradient, for the inputs and the cotangents."""
    first = gradient(case, double)
    outputs = [v.name for v in first.vjp.graph.output][first.split :]
    inputs = [v.name for v in first.vjp.graph.input]
    wrt = [*first.wrt, *inputs[len(first.model.graph.input) :]]
    return Gradient(first.vjp, onnxtrain.vjp(first.vjp, wrt, outputs), outputs, wrt)


@cache
def on_reference(case: OpCase, what: str) -> Callable[[Arrays], list[np.ndarray]]:
    """``model``, ``vjp`` or ``second`` in float64 on the reference evaluator."""
    return reference(_model(case, what, double=True))


@cache
def on_stock(case: OpCase, what: str) -> Callable[[Arrays], list[np.ndarray]]:
    """``model``, ``vjp`` or ``second`` in float32 on onnxruntime."""
    return stock(_model(case, what, double=False))


def _model(case: OpCase, what: str, double: bool) -> onnx.ModelProto:
    if what == "second":
        return second_gradient(case, double).vjp
    return case.build(double) if what == "model" else gradient(case, double).vjp


@cache
def feeds(case: OpCase) -> list[np.ndarray]:
    """Values of the run-time inputs."""
    pairs = zip(case.inputs, case.values(), strict=True)
    return [v for d, v in pairs if d is not None and v is not None and d.kind != "const"]


@cache
def cotangents(case: OpCase) -> dict[int, np.ndarray]:
    """A random cotangent for each float output, by output index."""
    rng = case.rng("cotangents")
    drawn = {}
    for i, y in enumerate(forward(case)(feeds(case))):
        if y is not None and is_float(gradient(case).model.graph.output[i]):
            drawn[i] = rng.standard_normal(y.shape).astype(np.float32).astype(np.float64)
    return drawn


def forward(case: OpCase) -> Callable[[Arrays], list[np.ndarray]]:
    """The function itself, computed by whom the case says."""
    if case.forward == "torch":
        oracle = oracle_of(case)
        assert oracle is not None
        return oracle.forward  # type: ignore[return-value]
    if case.forward == "onnxruntime":
        return on_stock(case, "model")
    if case.forward == "vjp":
        shapes = gradient(case, double=True)
        zeros = [
            np.zeros([d.dim_value for d in v.type.tensor_type.shape.dim])
            for v in shapes.vjp.graph.input[len(shapes.model.graph.input) :]
        ]
        run = on_reference(case, "vjp")
        return lambda given: run([*given, *zeros])[: shapes.split]
    return on_reference(case, "model")


def _vjp_at(case: OpCase, run: Callable[[Arrays], list[np.ndarray]]) -> list[np.ndarray]:
    """Outputs and gradients at the case's values and cotangents."""
    return run([*feeds(case), *cotangents(case).values()])


def _wide(case: OpCase) -> bool:
    """Whether float64 is available: the reference evaluator computes both forward and gradient."""
    return case.forward in ("reference", "vjp")


def _directional_derivative(
    function: Callable[[float], float],
    steps: tuple[float, float],
    stable: float,
    size: float,
    who: str,
) -> float:
    """The central difference at two step sizes, which must agree."""
    wide, narrow = ((function(h) - function(-h)) / (2 * h) for h in steps)
    assert np.isfinite(narrow), f"{who}: the forward value is not finite"
    assert abs(wide - narrow) <= stable * max(abs(narrow), size), (
        f"{who}: unstable finite difference, {wide:.8g} and {narrow:.8g}; draw inputs "
        "away from kinks, or name another `forward`"
    )
    return float(narrow)


def _dot(a: Arrays, b: Arrays) -> float:
    return float(sum(np.vdot(x, y) for x, y in zip(a, b, strict=True)))


def _size(gradients: Arrays, directions: Arrays) -> float:
    """A magnitude below which a directional derivative counts as nothing."""
    return 1e-3 + 1e-2 * sum(
        float(np.linalg.norm(g) * np.linalg.norm(u))
        for g, u in zip(gradients, directions, strict=True)
    )


def finite(case: OpCase, purpose: str = "direction") -> None:
    """The gradient along a random direction is the finite difference of the function."""
    run = forward(case)
    values, chosen = feeds(case), cotangents(case)
    evaluator = on_reference if _wide(case) else on_stock
    gradients = _vjp_at(case, evaluator(case, "vjp"))[gradient(case).split :]
    rng = case.rng(purpose)
    kinds = [d.kind for d in case.runtime.values()]
    move = [
        rng.standard_normal(v.shape) if k == "wrt" else None
        for v, k in zip(values, kinds, strict=True)
    ]
    directions = [u for u in move if u is not None]

    def along(h: float) -> float:
        at = [v if u is None else v + h * u for v, u in zip(values, move, strict=True)]
        outputs = run(at)
        return _dot([np.asarray(outputs[i], np.float64) for i in chosen], list(chosen.values()))

    size = _size(gradients, directions)
    exact = case.forward != "onnxruntime"
    steps, stable = ((1e-4, 1e-5), 1e-4) if exact else ((2e-2, 1e-2), 3e-2)
    expected = _directional_derivative(along, steps, stable, size, case.name)
    ours = _dot([g.astype(np.float64) for g in gradients], directions)
    tol = 1e-6 if _wide(case) else 10 * case.tol if exact else 3e-2
    assert abs(ours - expected) <= tol * max(abs(expected), size), (
        f"{case.name}: gradient along a direction is {ours:.8g}, difference {expected:.8g}"
    )


def oracle(case: OpCase) -> None:
    """Float32 on stock onnxruntime equals torch in float64 (no oracle: the float64 gradient)."""
    built = gradient(case)
    ours = _vjp_at(case, on_stock(case, "vjp"))
    names = [f"gradient of {n}" for n in case.wrt]
    torch = oracle_of(case)
    if torch is not None:
        values = torch.forward(feeds(case))
        known = [i for i, y in enumerate(values) if y is not None]
        assert known, f"{case.name}: the oracle gives no output"
        assert_close(
            [ours[i] for i in known],
            [values[i] for i in known],  # type: ignore[misc]
            [f"output {i}" for i in known],
            case.tol,
            case.name,
        )
        compared = {i: c for i, c in cotangents(case).items() if i in known}
        if len(compared) < len(cotangents(case)):  # ignore the unknown outputs in ours as well
            silent = [c if i in known else 0 * c for i, c in cotangents(case).items()]
            ours = on_stock(case, "vjp")([*feeds(case), *silent])
        theirs = torch.backward(feeds(case), compared)
        assert_close(ours[built.split :], theirs, names, case.tol, case.name)
    elif _wide(case):
        theirs = _vjp_at(case, on_reference(case, "vjp"))
        outputs = [f"output {i}" for i in range(built.split)]
        assert_close(ours, theirs, [*outputs, *names], case.tol, case.name)
    else:
        for i in range(3):
            finite(case, f"direction {i}")


def dynamic(case: OpCase) -> None:
    """Symbolic dims give the numbers of static ones."""
    static = _vjp_at(case, on_stock(case, "vjp"))
    allowed = {"all": ("batch", "all"), "batch": ("batch",), "none": ()}[case.dynamic.split(":")[0]]
    for extent in allowed:
        built = gradient(case, dynamic=extent)
        ours = _vjp_at(case, stock(built.vjp))
        names = [v.name for v in built.vjp.graph.output]
        assert_close(ours, static, names, 1e-5, f"{case.name} with dynamic dims ({extent})")


def second(case: OpCase) -> None:
    """The gradient of the gradient equals torch's, or finite differences of the gradient."""
    built = second_gradient(case)
    rng = case.rng("second")
    weights = [
        rng.standard_normal(v.shape)
        for v, d in zip(feeds(case), case.runtime.values(), strict=True)
        if d.kind == "wrt"
    ]
    weights = [w.astype(np.float32).astype(np.float64) for w in weights]
    given = [*feeds(case), *cotangents(case).values(), *weights]
    torch = oracle_of(case)
    theirs = None
    if torch is not None and all(
        torch.forward(feeds(case))[i] is not None for i in cotangents(case)
    ):
        theirs = torch.second(feeds(case), cotangents(case), weights)
    if theirs is not None:
        ours = on_stock(case, "second")(given)[built.split :]
        names = [f"second gradient of {n}" for n in built.wrt]
        assert_close(ours, theirs, names, 3 * case.tol, case.name)
        return
    evaluator = on_reference if _wide(case) else on_stock
    ours = evaluator(case, "second")(given)[built.split :]
    first = evaluator(case, "vjp")
    names = [v.name for v in built.model.graph.input]
    move = {names.index(n): rng.standard_normal(given[names.index(n)].shape) for n in built.wrt}
    directions = list(move.values())

    def along(h: float) -> float:
        at = [v + h * move[i] if i in move else v for i, v in enumerate(given[: len(names)])]
        gradients = first(at)[gradient(case).split :]
        return _dot([g.astype(np.float64) for g in gradients], weights)

    size = _size(ours, directions)
    steps, stable, tol = ((1e-4, 1e-5), 1e-4, 1e-6) if _wide(case) else ((2e-2, 1e-2), 3e-2, 3e-2)
    expected = _directional_derivative(along, steps, stable, size, case.name)
    actual = _dot([g.astype(np.float64) for g in ours], directions)
    assert abs(actual - expected) <= tol * max(abs(expected), size), (
        f"{case.name}: second gradient along a direction is {actual:.8g}, difference {expected:.8g}"
    )


def standard(case: OpCase) -> None:
    """The gradient model keeps the contract: names, ai.onnx only, full checker, no dead node."""
    for extent in ("", "all"):
        if extent and case.dynamic != "all":
            continue
        built = gradient(case, dynamic=extent)
        _check_contract(built)
        check_standard(built.vjp)


def _check_contract(built: Gradient) -> None:
    names = [v.name for v in built.model.graph.input] + [f"{y}_grad" for y in built.cotangents]
    assert [v.name for v in built.vjp.graph.input] == names
    names = [v.name for v in built.model.graph.output] + [f"{x}_grad" for x in built.wrt]
    assert [v.name for v in built.vjp.graph.output] == names
    types = {v.name: v.type.tensor_type for v in built.model.graph.input}
    for value in built.vjp.graph.output[built.split :]:
        assert value.type.tensor_type.elem_type == types[value.name[:-5]].elem_type
        rank = len(value.type.tensor_type.shape.dim)
        assert rank == len(types[value.name[:-5]].shape.dim), f"{value.name} has rank {rank}"


def check_standard(model: onnx.ModelProto) -> None:
    """The model has ai.onnx operators only, passes the full checker, and has no dead node."""
    versions = {o.domain: o.version for o in model.opset_import}
    assert set(versions) == {""}
    assert versions[""] <= NEWEST_OPSET
    assert model.ir_version <= NEWEST_IR
    assert not model.functions
    foreign = {n.op_type for n in nodes_of(model.graph) if n.domain not in ("", "ai.onnx")}
    assert not foreign, f"not in ai.onnx: {foreign}"
    onnx.checker.check_model(model, full_check=True)
    used = {v.name for v in model.graph.output}
    for node in nodes_of(model.graph):
        used.update(node.input)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                used.update(v.name for v in graph.output)
    dead = [n.name or n.op_type for n in nodes_of(model.graph) if not used.intersection(n.output)]
    assert not dead, f"dead nodes: {dead}"


def nodes_of(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """All nodes, also those of subgraphs."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                nodes += nodes_of(inner)
    return nodes


def rebuild(case: OpCase) -> None:
    """The same model gives the same bytes, and is not touched."""
    built = gradient(case)
    before = built.model.SerializeToString()
    again = onnxtrain.vjp(built.model, built.wrt, built.cotangents)
    assert again.SerializeToString() == built.vjp.SerializeToString()
    assert built.model.SerializeToString() == before


def closed(case: OpCase) -> None:
    """Every operator that the rule emits can itself be differentiated, or is declared not to."""
    emitted = {n.op_type for n in nodes_of(gradient(case).vjp.graph)}
    open_ends = sorted(op for op in emitted if how(op) is None)
    assert not open_ends, f"{case.name} emits operators without a gradient: {open_ends}"


def targets(case: OpCase) -> None:
    """Every target's form gives the numbers of the default form."""
    default = gradient(case)
    expected = _vjp_at(case, on_stock(case, "vjp"))
    names = [v.name for v in default.vjp.graph.output]
    seen = {default.vjp.SerializeToString()}
    for target in TARGETS:
        built = gradient(case, target=target)
        graph = built.vjp.SerializeToString()
        if graph in seen:
            continue
        seen.add(graph)
        _check_contract(built)
        check_standard(built.vjp)
        ours = _vjp_at(case, stock(built.vjp))
        assert_close(ours, expected, names, case.tol, f"{case.name} for {target}")
