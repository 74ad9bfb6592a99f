"""The operator lists with which reduced builds of onnxruntime are made.

A line is ``domain;opset[,opset...];Op,Op...``; an operator may be followed by types in braces,
which are passed over.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from onnxtrain.errors import ProfileError
from onnxtrain.graph.nodes import nodes
from onnxtrain.lowering.profile import Profile

_BRACES = re.compile(r"\{[^{}]*\}")


def read_config(text: str, name: str) -> Profile:
    """Return the profile of a build from the text of its ``required_operators.config``."""
    by_opset: dict[int, set[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line or line.startswith("!"):  # "!" lines are about types for the whole build
            continue
        while _BRACES.search(line):
            line = _BRACES.sub("", line)
        parts = [p.strip() for p in line.split(";")]
        if len(parts) != 3 or not re.fullmatch(r"\d+(,\d+)*", parts[1].replace(" ", "")):
            raise ProfileError(
                f"{name}, line {number}: not an operator list: {line!r}\n"
                "hint: domain;opset;Op,Op,... as create_reduced_build_config.py writes it"
            )
        if parts[0] not in ("ai.onnx", ""):
            continue
        ops = {o.strip() for o in parts[2].split(",") if o.strip()}
        for opset in parts[1].split(","):
            by_opset.setdefault(int(opset), set()).update(ops)
    if not by_opset:
        raise ProfileError(f"{name}: lists no operators of ai.onnx")
    # Kernels are built for the versions of each listed opset; only those are certain.
    newest = max(by_opset)
    return Profile(
        name=name,
        opset=(newest, newest),
        prefer=newest,
        control_flow=tuple(sorted(by_opset[newest] & {"If", "Loop", "Scan"})),
        ops={o: {} for o in sorted(by_opset[newest])},
        source=name,
    )


def write_config(model: ir.Model) -> str:
    """Return the text of a ``required_operators.config`` for a model."""
    opset = model.opset_imports.get("", 0)
    ops = sorted({n.op_type for n in nodes(model.graph, subgraphs=True)})
    return f"ai.onnx;{opset};{','.join(ops)}\n"
