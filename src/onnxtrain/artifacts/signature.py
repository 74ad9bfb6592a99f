"""A graph whose inputs and outputs are declared one by one, each with its role."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.finish import finish
from onnxtrain.graph.simplify.redundant import remove_dead
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.passes.pipeline import rewrite_final
from onnxtrain.targets import Target, find

FILES = {
    "train": "training_model.onnx",
    "eval": "eval_model.onnx",
    "optimizer": "optimizer_model.onnx",
    "step": "step_model.onnx",
    "infer": "inference_model.onnx",
    "gradients": "gradient_model.onnx",
    "scalars": "scalar_model.onnx",
    "update": "update_model.onnx",
}
_NAMES = re.compile(
    rf"({'|'.join(f.removesuffix('.onnx') for f in FILES.values())})((?:\.[a-z0-9]+)*)\.onnx$"
)


def plain_name(file: str) -> str:
    """Return a model's file name without the prefix that it was saved with.

    >>> plain_name("net_step_model.x8.onnx")
    'step_model.x8.onnx'
    """
    match = _NAMES.search(file)
    return file if match is None else match[0]


def is_model_name(file: str, prefix: str) -> bool:
    """Return whether a file is called as models are that are saved with a prefix.

    >>> is_model_name("net_step_model.x8.onnx", "net_"), is_model_name("mine_model.onnx", "")
    (True, False)
    """
    return file.startswith(prefix) and _NAMES.match(file, len(prefix)) is not None


def key_of(spec: ModelSpec) -> str:
    """Return what a model is called among its like: its role, and what tells it from the plain one.

    >>> key_of(ModelSpec("step", "net_step_model.x8.onnx", (), ()))
    'step.x8'
    """
    match = _NAMES.search(spec.file)
    return spec.role + ("" if match is None else match[2])


class GraphSignature:
    """A graph under construction; the order of declarations is the order of the contract."""

    def __init__(self, role: str, model: ir.Model, op: OpBuilder) -> None:
        self.role, self.model, self.op = role, model, op
        self._inputs: list[tuple[ir.Value, str]] = []
        self._outputs: list[tuple[ir.Value, str, ir.Value | None]] = []
        self._named: set[str | None] = set()
        self._seen = [0, 0, 0]  # inputs, outputs and inputs of the graph whose names are known

    def declare(self, values: Sequence[ir.Value], role: str) -> None:
        """Declare values that are inputs of the graph already."""
        self._inputs += [(x, role) for x in values]

    def input(
        self, name: str, role: str, dtype: ir.DataType, dims: Sequence[int | str]
    ) -> ir.Value:
        """Declare a new input; its name gets ``.2``, ``.3`` ... if it is taken outside."""
        value = ir.Value(type=ir.TensorType(dtype), shape=ir.Shape(dims))
        value.name = self._claim(name)
        self.declare([value], role)
        return value

    def output(
        self, name: str, role: str, value: ir.Value, feeds: ir.Value | None = None
    ) -> ir.Value:
        """Declare an output, a value of its own with this name."""
        out = self.op.Identity(value)
        shape, kind = value.shape, value.type
        out.name = self._claim(name)
        out.type, out.shape = kind, shape
        self._outputs.append((out, role, feeds))
        return out

    def _claim(self, wanted: str) -> str:
        """Return a free name; a value inside the graph that has it is renamed."""
        op = self.op
        outside, stored = self._outside(), self.model.graph.initializers
        name, n = wanted, 2
        while name in outside or name in stored:
            name, n = f"{wanted}.{n}", n + 1
        if name in op.names.taken:
            for node in self.model.graph.all_nodes():
                if node.name == name:
                    node.name = op.names.fresh(f"{name}.inner")
                for y in node.outputs:
                    if y.name == name:
                        y.name = op.names.fresh(f"{name}.inner")
        op.names.taken.add(name)
        return name

    def _outside(self) -> set[str | None]:
        """Return the names of inputs and outputs; those that are new since the last time are added.

        To gather all of them each time would take long: there may be thousands.
        """
        inner = self.model.graph.inputs
        first = self._seen
        new = [x for x, _ in self._inputs[first[0] :]]
        new += [y for y, _, _ in self._outputs[first[1] :]]
        new += inner[first[2] if first[2] <= len(inner) else 0 :]
        self._named.update(x.name for x in new)
        self._seen = [len(self._inputs), len(self._outputs), len(inner)]
        return self._named

    def replace_output(
        self, old: ir.Value, name: str, role: str, value: ir.Value, feeds: ir.Value
    ) -> None:
        """Put a value of the graph in the place of an output, under another name and role."""
        at = [y for y, _, _ in self._outputs].index(old)
        value.name = self._claim(name)
        self._outputs[at] = (value, role, feeds)

    def outputs_of(self, role: str) -> list[ir.Value]:
        """Return the outputs of a role, in the order of their declaration."""
        return [y for y, own, _ in self._outputs if own == role]

    def optimize(self, target: str | Target) -> None:
        """Simplify the graph and run the final passes."""
        self._set_ends()
        graph = self.model.graph
        names = [y.name for y in graph.outputs]
        rewrite_final(self.model, target, last=True)
        assert [y.name for y in graph.outputs] == names, "simplify keeps outputs"
        outputs = zip(graph.outputs, self._outputs, strict=True)
        self._outputs = [(y, role, feeds) for y, (_, role, feeds) in outputs]

    def sweep(self) -> None:
        """Drop what no output needs any more."""
        self._set_ends()
        remove_dead(self.model)

    def build(self, target: str | Target) -> tuple[onnx.ModelProto, ModelSpec]:
        """Simplify, serialise and describe the model."""
        self.optimize(target)
        return self.finish(target)

    def finish(self, target: str | Target) -> tuple[onnx.ModelProto, ModelSpec]:
        """Serialise and describe the model as it is."""
        self._set_ends()
        spec = ModelSpec(
            role=self.role,
            file=FILES[self.role],
            target=find(target).name,
            inputs=tuple(describe(x, role) for x, role in self._inputs),
            outputs=tuple(
                describe(y, role, None if feeds is None else feeds.name)
                for y, role, feeds in self._outputs
            ),
        )
        return finish(self.model), spec

    def _set_ends(self) -> None:
        graph = self.model.graph
        graph.inputs.clear()
        graph.inputs.extend(x for x, _ in self._inputs)
        graph.outputs.clear()
        graph.outputs.extend(y for y, _, _ in self._outputs)
        graph.name = FILES[self.role].removesuffix(".onnx")


def describe(x: ir.Value, role: str, feeds: str | None = None) -> TensorSpec:
    """Return the entry of an input or output in the manifest."""
    dims = S.dims_of(x) or ()
    shape = tuple(d if isinstance(d, int) else str(d or "?") for d in dims)
    return TensorSpec(x.name or "", dtype_name(x.dtype), shape, role, feeds)


def dtype_name(dtype: ir.DataType | None) -> str:
    """Return the manifest's word for a type: numpy's.

    >>> dtype_name(ir.DataType.FLOAT)
    'float32'
    """
    if dtype is None:
        return "sequence"
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name


def dtype_from_name(name: str) -> ir.DataType:
    """Return the type that the manifest has a word for.

    >>> dtype_from_name("float32").name
    'FLOAT'
    """
    return ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper())]
