"""Which nodes of a model a runtime would not run, and why."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes.infer import infer_shapes
from onnxtrain.lowering.forms import Draft
from onnxtrain.lowering.profile import Profile, objection


@dataclass(frozen=True)
class Problem:
    """One node, or the model itself, and why the runtime would not run it."""

    node: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node!r}: {self.what}: {self.why}" if self.node else self.why


def problems(model: ir.Model, profile: Profile) -> list[Problem]:
    """Return what stands between a loaded model and a runtime, as the model is."""
    opset = model.opset_imports.get("", 0)
    obstacles: list[Problem] = []
    low, high = profile.opset
    if not low <= opset <= high:
        why = f"opset {opset}; {profile.name} reads {low} to {high}"
        obstacles.append(Problem("", "", why))
    low, high = profile.ir
    if not low <= model.ir_version <= high:
        why = f"IR version {model.ir_version}; {profile.name} reads {low} to {high}"
        obstacles.append(Problem("", "", why))
    infer_shapes(model.graph, opset)
    for node in model.graph.all_nodes():
        if not is_standard(node):
            why: str | None = f"an operator of domain {node.domain!r}"
        else:
            d = Draft(node.op_type, list(node.inputs), dict(node.attributes), node, opset)
            why = objection(profile, d, opset)
        if why is not None:
            name = node.name or next((y.name for y in node.outputs if y.name), "") or ""
            obstacles.append(Problem(name, S.describe(node), why))
    return obstacles
