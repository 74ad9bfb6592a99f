"""What a training run holds in memory, part by part, predicted from its artifacts."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts import Artifacts
from onnxtrain.graph.memory import Sizes
from onnxtrain.graph.shapes.dims import dim
from onnxtrain.manifest import ModelSpec
from onnxtrain.planning.step_memory import ExecutedGraph, StepMemory
from onnxtrain.runtime.executed_graph import executed_graph
from onnxtrain.runtime.feeds import numpy_dtype
from onnxtrain.training.layouts import pick_layout, spec_of

_INTERPRETER = 120 << 20  # where it cannot be measured
_SESSIONS = 22 << 20  # kernels' code that is read, pools, the sessions of the update
_NODE = 8 << 10  # bytes that a session takes for a node
_PACKED_WEIGHT = 0.5  # bytes for a weight of 4 bits, in the form that kernels want
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm")


class Run:
    """A training run on the CPU whose memory is predicted.

    Args:
        artifacts: what would be trained.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        manifest = artifacts.manifest
        vector = manifest.model("gradients") is not None and manifest.accumulate == 1
        layout = "vector" if vector else pick_layout(artifacts, "cpu")
        role = {"vector": "gradients", "fused": "step"}.get(layout, "train")
        self.layout, self.spec = layout, spec_of(artifacts, role)
        self._steps: dict[tuple[tuple[str, int], ...], StepMemory] = {}

    @functools.cached_property
    def graph(self) -> ExecutedGraph:
        """The graph of a step, as it runs."""
        source = self.artifacts.source_of(self.spec)
        if isinstance(source, str):
            written = onnx.load(source, load_external_data=False)
        else:
            written = onnx.load_from_string(source)
        outputs = {t.name for t in self.spec.outputs}
        return ExecutedGraph(executed_graph(source), written, outputs)

    def step(self, symbols: Mapping[str, int]) -> StepMemory:
        """Return the memory of a step at numbers for symbolic sizes."""
        key = tuple(sorted(symbols.items()))
        if key not in self._steps:
            self._steps[key] = self.graph.memory(symbols)
        return self._steps[key]

    def parts(self, symbols: Mapping[str, int]) -> dict[str, int]:
        """Return bytes by what they are for, at numbers for symbolic sizes."""
        step = self.step(symbols)
        frozen, packed = self._frozen()
        values, state = (
            sum(a.nbytes for a in part.values())
            for part in (self.artifacts.values, self.artifacts.state)
        )
        return {
            "interpreter and libraries": interpreter_memory(),
            "sessions": _SESSIONS + _NODE * len(self.graph.nodes),
            "frozen weights": frozen,
            "packed copies of frozen weights": packed,
            "trained weights": values * (2 if self.layout == "fused" else 1),
            "optimizer state": state * (2 if self.layout == "fused" else 1),
            "gradients": self._gradients(),
            "activations": step.live,
            "gaps and workspaces": max(step.arena - step.live, 0),
            "batch": _batch(self.spec, symbols),
        }

    def _gradients(self) -> int:
        trained = sum(
            math.prod(p.shape) * np.dtype(numpy_dtype(p.dtype)).itemsize
            for p in self.artifacts.manifest.parameters
        )
        return trained * {"vector": 1, "separate": 2}.get(self.layout, 0)

    def _frozen(self) -> tuple[int, int]:
        """Return the bytes of weights in the graph, and of the copies that kernels make of them."""
        sizes = Sizes()
        weights = self.graph.weights
        packed = 0.0
        for node in self.graph.nodes:
            b = node.inputs[1] if len(node.inputs) > 1 else None
            if b is None or b.name not in weights:
                continue
            if node.op_type in _PRODUCTS and b.dtype == ir.DataType.FLOAT:
                packed += sizes(b)
            elif node.op_type == "MatMulNBits":
                n, k = (node.attributes.get_int(a, 0) for a in ("N", "K"))
                packed += n * k * _PACKED_WEIGHT
        return sum(sizes(x) for x in weights.values()), int(packed)


def _batch(spec: ModelSpec, symbols: Mapping[str, int]) -> int:
    sizes = Sizes(symbols)
    total = 0
    for t in spec.inputs_of("input", "target"):
        count = sizes.elements([dim(d) for d in t.shape]) or 0
        total += count * np.dtype(numpy_dtype(t.dtype)).itemsize
    return total


@functools.cache
def interpreter_memory() -> int:
    """Return what a process takes once the libraries are imported, measured where possible."""
    code = "import onnxtrain, onnxruntime; print(open('/proc/self/status').read())"
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        lines = [x for x in run.stdout.splitlines() if x.startswith("VmRSS")]
        return int(lines[0].split()[1]) << 10
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return _INTERPRETER
