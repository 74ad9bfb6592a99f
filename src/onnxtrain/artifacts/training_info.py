"""Training artifacts as one ONNX file: ``ModelProto.graph`` and ``ModelProto.training_info``.

The standard keeps training beside the model: a ``TrainingInfoProto`` has a graph ``algorithm``,
which is appended to the graph of the model, and ``update_binding``, pairs of an initializer and the
output that replaces it after each step. :func:`to_proto` writes artifacts in this form:

========================  =====================================================================
graph                     the inference model, with the current parameters
training_info[0]          one training step: batch in, loss and updates out
training_info[1]          evaluation: loss and metrics, no update
========================  =====================================================================

An algorithm must not use a name of the graph, so its own names start with ``training/``. What a
trainer feeds at each step comes from initializers: ``step`` counts the updates, ``learning_rate``
is an input with a default, ``seed`` seeds dropout. Metadata gives :func:`from_proto` the manifest
and what was added, so that reading returns the models as they were. A file of another program has
no such metadata; :func:`import_algorithm` reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.graphs import (
    BuiltModel,
    GraphSignature,
    dtype_from_name,
    inference_model,
    model_key,
)
from onnxtrain.autodiff.differentiate import ancestor_nodes
from onnxtrain.autodiff.gradient_nodes import TRAINING_DOMAIN
from onnxtrain.autodiff.gradients import GradientModel, load_normalized
from onnxtrain.errors import CheckpointError, LoadError, PrepareError, SaveError, by_caller
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io import load
from onnxtrain.graph.io.limits import Limits, Problems, quote
from onnxtrain.graph.io.reader import parse, read_file
from onnxtrain.graph.io.writer import all_tensors
from onnxtrain.graph.nodes import STOP_GRADIENT, captured
from onnxtrain.importer.functions import inline_functions
from onnxtrain.importer.opset import to_working_opset
from onnxtrain.manifest import Manifest, ModelSpec, StateSpec, WeightSpec
from onnxtrain.runtime import session as runtime

METADATA_KEY = "onnxtrain.training_info"
_PREFIX = "training/"
_MISFITS = (
    *(AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError),
    onnx.checker.ValidationError,
)
_PROGRESS = ("lr", "properties", "seed", "step")
_RANDOM_PERIOD = 1 << 24  # draws are whole numbers that float32 holds exactly


@dataclasses.dataclass
class Content:
    """The parts of artifacts that a file with training info carries."""

    manifest: Manifest
    models: dict[str, onnx.ModelProto]
    values: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    meta: dict[str, Any]


def to_proto(content: Content) -> onnx.ModelProto:
    """Return the artifacts as one model with training info.

    Raises:
        SaveError: the artifacts have no step model, or accumulate gradients.
    """
    manifest, models = content.manifest, content.models
    step, infer = manifest.model("step"), manifest.model("infer")
    if manifest.accumulate > 1:
        raise SaveError(
            f"these artifacts accumulate gradients over {manifest.accumulate} batches, and a "
            "training step of the standard has one batch\nhint: build with accumulate=1"
        )
    if step is None or infer is None:
        raise SaveError(
            "these artifacts have no step model or no inference model\nhint: build them again"
        )
    evaluation = manifest.model("eval", step.target)
    specs = [step] if evaluation is None else [step, evaluation]
    proto = _inference(models[model_key(infer)], models[model_key(step)])
    _set_initializers(proto.graph, content.values)
    entries = []
    for spec in specs:
        writer = _Writer(proto.graph, spec, models[model_key(spec)], content)
        proto.training_info.append(writer.write())
        entries.append(writer.entry())
    kept = dataclasses.replace(
        manifest,
        models=(*specs, infer),
        parameters=_without_locations(manifest.parameters),
        buffers=_without_locations(manifest.buffers),
        weights=None,
    )
    metadata = {
        "entries": entries,
        "manifest": kept.to_dict(hashes=False),
        "meta": {n: content.meta[n] for n in _PROGRESS if n in content.meta},
    }
    del proto.metadata_props[:]
    proto.metadata_props.add(key=METADATA_KEY, value=json.dumps(metadata, sort_keys=True))
    imported = {o.domain: o for o in proto.opset_import}
    for spec in specs:
        model = models[model_key(spec)]
        proto.ir_version = max(proto.ir_version, model.ir_version)
        for o in model.opset_import:
            if o.domain not in imported:
                imported[o.domain] = proto.opset_import.add(domain=o.domain, version=o.version)
    return proto


def _without_locations(weights: Sequence[WeightSpec]) -> tuple[WeightSpec, ...]:
    return tuple(dataclasses.replace(w, locations=()) for w in weights)


def _inference(infer: onnx.ModelProto, step: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the inference model at the opset of the step: a file has one opset."""
    proto = onnx.ModelProto()
    proto.CopyFrom(infer)
    (opset,) = (o.version for o in step.opset_import if o.domain == "")
    if any(o.version == opset for o in proto.opset_import if o.domain in ("", "ai.onnx")):
        return proto
    model = load(proto)
    if model.functions:
        model = inline_functions(model)
    model = to_working_opset(model, fused=lambda key: False)
    if model.opset_imports[""] != opset:
        raise SaveError(
            f"the inference model has opset {model.opset_imports['']}, the training step {opset}\n"
            "hint: build with a model of opset 21"
        )
    return ir.to_proto(model)


def _set_initializers(graph: onnx.GraphProto, values: Mapping[str, np.ndarray]) -> None:
    """Write values into the initializers of the same type."""
    for tensor in graph.initializer:
        array = values.get(tensor.name)
        if array is not None:
            dtype = ir.DataType(tensor.data_type)
            tensor.CopyFrom(_tensor(tensor.name, np.asarray(array).astype(dtype.numpy()), dtype))


def _tensor(name: str, array: np.ndarray, dtype: ir.DataType | None = None) -> onnx.TensorProto:
    dtype = dtype or ir.DataType.from_numpy(array.dtype)
    return ir.to_proto(
        ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), dtype, name=name)
    )


class _Writer:
    """Turns the model of a role into a ``TrainingInfoProto`` beside an inference graph."""

    def __init__(
        self, graph: onnx.GraphProto, spec: ModelSpec, model: onnx.ModelProto, content: Content
    ) -> None:
        self._spec, self._model, self._content = spec, model, content
        self._shared = {t.name: t for t in graph.initializer}
        self._graph_inputs = {x.name: x for x in graph.input}
        self._taken = _names_in(graph) | {_PREFIX + n for n in _names_in(model.graph)}
        self._names: dict[str, str] = {}  # own name -> name in the file
        self._front: list[onnx.NodeProto] = []
        self._back: list[onnx.NodeProto] = []
        self.info = onnx.TrainingInfoProto()

    def write(self) -> onnx.TrainingInfoProto:
        """Return the training info."""
        algorithm, own = self.info.algorithm, self._model.graph
        algorithm.name = own.name or self._spec.role
        inputs = {x.name: x for x in own.input}
        for t in self._spec.inputs:
            _INPUTS[t.role](self, inputs[t.name])
        for tensor in own.initializer:
            shared = self._shared.get(tensor.name)
            if shared is not None and _same(shared, tensor):
                self._names[tensor.name] = tensor.name
            else:
                self._initializer(tensor.name, tensor)
        outputs = {y.name: y for y in own.output}
        for t in self._spec.outputs:
            name = t.name
            if t.feeds is None:
                self._names[name] = self._claim(name)
        body = onnx.GraphProto()
        body.CopyFrom(own)
        _rename(body, self._renamed)
        for t in self._spec.outputs:
            value = algorithm.output.add()
            value.CopyFrom(outputs[t.name])
            value.name = self._renamed(t.name)
            if t.feeds is not None:
                self._bind(t.feeds, value)
        algorithm.node.extend([*self._front, *body.node, *self._back])
        algorithm.value_info.extend(body.value_info)
        return self.info

    def entry(self) -> dict[str, Any]:
        """Return what :func:`from_proto` needs to undo :meth:`write`."""
        return {
            "role": self._spec.role,
            "names": {new: own for own, new in self._names.items()},
            "added": [len(self._front), len(self._back)],
            "initializers": [t.name for t in self._model.graph.initializer],
            "opsets": {o.domain: o.version for o in self._model.opset_import},
            "ir_version": self._model.ir_version,
        }

    def _renamed(self, name: str) -> str:
        return self._names.get(name, _PREFIX + name) if name else ""

    def _claim(self, name: str) -> str:
        new = name
        while new in self._taken:
            new = _PREFIX + new
        self._taken.add(new)
        return new

    def _initializer(self, name: str, tensor: onnx.TensorProto) -> str:
        """Add an initializer under the name that ``name`` has in the file; return that name."""
        new = self.info.algorithm.initializer.add()
        new.CopyFrom(tensor)
        new.name = self._renamed(name)
        return new.name

    def _constant(self, stem: str, value: Any, dtype: Any) -> str:
        name = self._claim(_PREFIX + stem)
        self.info.algorithm.initializer.append(_tensor(name, np.asarray(value, dtype)))
        return name

    def _node(self, op_type: str, inputs: Sequence[str], output: str, *attributes: ir.Attr) -> None:
        self._front.append(
            onnx.NodeProto(
                op_type=op_type,
                name=output,
                input=inputs,
                output=[output],
                attribute=[ir.to_proto(a) for a in attributes],
            )
        )

    def batch_input(self, x: onnx.ValueInfoProto) -> None:
        """Read an input of the inference graph, or add one."""
        known = self._graph_inputs.get(x.name)
        if known is None:
            self.target(x)
        elif known.type.tensor_type.elem_type == x.type.tensor_type.elem_type:
            self._names[x.name] = x.name
        else:
            self._cast(x.name, x.name, x.type.tensor_type.elem_type)

    def target(self, x: onnx.ValueInfoProto) -> None:
        """Add an input to the algorithm."""
        self._names[x.name] = self._claim(x.name)
        new = self.info.algorithm.input.add()
        new.CopyFrom(x)
        new.name = self._names[x.name]

    def parameter(self, x: onnx.ValueInfoProto) -> None:
        """Read an initializer of the inference graph; keep a master copy of another type."""
        known = self._shared.get(x.name)
        array = self._content.values[x.name]
        dtype = ir.DataType(x.type.tensor_type.elem_type)
        if known is not None and known.data_type == dtype:
            self._names[x.name] = x.name
        elif known is not None and self._spec.role == "eval":
            self._cast(x.name, x.name, int(dtype))
        else:
            self._initializer(x.name, _tensor(x.name, array, dtype))

    def state(self, x: onnx.ValueInfoProto) -> None:
        """Add a state tensor of the optimizer."""
        self._names[x.name] = self._claim(x.name)
        dtype = ir.DataType(x.type.tensor_type.elem_type)
        self._initializer(x.name, _tensor(x.name, self._content.state[x.name], dtype))

    def learning_rate(self, x: onnx.ValueInfoProto) -> None:
        """Add the learning rate: an input with a default."""
        self.target(x)
        lr = self._content.meta.get("lr", self._content.manifest.optimizer.get("lr"))
        self._initializer(x.name, _tensor(x.name, np.asarray([lr], np.float32)))

    def step(self, x: onnx.ValueInfoProto) -> None:
        """Count the updates in an initializer; the algorithm reads the count plus one."""
        dtype = ir.DataType(x.type.tensor_type.elem_type)
        done = self._claim(x.name)
        self._names[x.name] = self._claim(f"{_PREFIX}{x.name}")
        count = np.asarray([self._content.meta.get("step", 0)], dtype.numpy())
        self.info.algorithm.initializer.append(_tensor(done, count))
        one = self._constant("one", [1], dtype.numpy())
        self._node("Add", [done, one], self._names[x.name])
        new = self.info.algorithm.output.add()
        new.CopyFrom(x)
        new.name = self._names[x.name]
        self.info.update_binding.add(key=done, value=new.name)

    def rng(self, x: onnx.ValueInfoProto) -> None:
        """Compute (seed, number of the draw) from the step; a constant one for evaluation."""
        self._names[x.name] = self._claim(_PREFIX + x.name)
        seed = self._claim("seed")
        number = np.asarray([self._content.meta.get("seed", 0)], np.float32)
        self.info.algorithm.initializer.append(_tensor(seed, number))
        step = next((self._renamed(t.name) for t in self._spec.inputs if t.role == "step"), None)
        if step is None:
            draw = self._constant("draw", [0], np.float32)
        else:
            integer = next(t.dtype for t in self._spec.inputs if t.role == "step")
            period = self._constant("period", [_RANDOM_PERIOD], integer)
            rest, draw = self._claim(f"{_PREFIX}rest"), self._claim(f"{_PREFIX}draw")
            self._node("Mod", [step, period], rest)
            self._node("Cast", [rest], draw, ir.AttrInt64("to", int(ir.DataType.FLOAT)))
        self._node("Concat", [seed, draw], self._names[x.name], ir.AttrInt64("axis", 0))

    def _cast(self, name: str, source: str, dtype: int) -> None:
        self._names[name] = self._claim(_PREFIX + name)
        self._node("Cast", [source], self._names[name], ir.AttrInt64("to", dtype))

    def _bind(self, name: str, value: onnx.ValueInfoProto) -> None:
        """Bind a new value to what it replaces, and its rounded copy to a parameter in 16 bits."""
        self.info.update_binding.add(key=self._renamed(name), value=value.name)
        known = self._shared.get(name)
        if known is None or self._renamed(name) == name:
            return
        rounded = self.info.algorithm.output.add()
        rounded.CopyFrom(value)
        rounded.name = self._claim(f"{value.name}.rounded")
        rounded.type.tensor_type.elem_type = known.data_type
        self._back.append(
            onnx.NodeProto(
                op_type="Cast",
                name=rounded.name,
                input=[value.name],
                output=[rounded.name],
                attribute=[ir.to_proto(ir.AttrInt64("to", known.data_type))],
            )
        )
        self.info.update_binding.add(key=name, value=rounded.name)


_INPUTS: dict[str, Callable[[_Writer, onnx.ValueInfoProto], None]] = {
    "input": _Writer.batch_input,
    "target": _Writer.target,
    "parameter": _Writer.parameter,
    "buffer": _Writer.parameter,
    "state": _Writer.state,
    "lr": _Writer.learning_rate,
    "step": _Writer.step,
    "rng": _Writer.rng,
}


def _same(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    """Return whether two tensors have equal elements."""
    if a.data_type != b.data_type or list(a.dims) != list(b.dims):
        return False
    return ir.from_proto(a).tobytes() == ir.from_proto(b).tobytes()


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for sub in (attribute.g, *attribute.graphs):
                yield from _graphs(sub)


def _names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all values and nodes."""
    return {
        name
        for g in _graphs(graph)
        for name in (
            *(x.name for part in (g.input, g.output, g.initializer, g.node) for x in part),
            *(y for node in g.node for y in node.output),
        )
    }


def _rename(graph: onnx.GraphProto, new: Callable[[str], str]) -> None:
    """Rename all values and nodes of a graph and its subgraphs, in place."""
    for g in _graphs(graph):
        for part in (g.input, g.output, g.initializer, g.value_info):
            for x in part:
                x.name = new(x.name)
        for node in g.node:
            node.name = new(node.name)
            node.input[:] = [new(x) for x in node.input]
            node.output[:] = [new(y) for y in node.output]
            if node.domain == TRAINING_DOMAIN:  # Gradient names values in its attributes
                for a in node.attribute:
                    a.strings[:] = [new(x.decode()).encode() for x in a.strings]
                    if a.name == "y":
                        a.s = new(a.s.decode()).encode()


def read_training_info(path: str, *, loss: str | None, initialize: bool) -> Content:
    """Return the artifacts in a file with training info; see ``Artifacts.from_training_info``."""
    limits, problems = Limits(), Problems(repr(path))
    proto = parse(read_file(path, limits, problems), limits, problems)
    for tensor in all_tensors(proto):  # a location may be any file of this machine
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise LoadError(
                f"{path!r}: tensor {quote(tensor.name)} is in another file, which models with "
                "training_info must not be\nhint: save the model with its weights inside"
            )
    content = from_proto(proto, repr(path))
    return import_algorithm(proto, loss=loss, initialize=initialize) if content is None else content


def from_proto(proto: onnx.ModelProto, label: str) -> Content | None:
    """Return the artifacts that :func:`to_proto` wrote; ``None`` for files of other programs.

    Raises:
        CheckpointError: the file was changed so that its metadata does not fit.
    """
    text = next((p.value for p in proto.metadata_props if p.key == METADATA_KEY), None)
    if text is None:
        return None
    try:
        metadata = json.loads(text)
        entries = metadata["entries"]
        manifest = Manifest.from_json(json.dumps(metadata["manifest"]), label)
        meta = dict(metadata["meta"])
        pairs = list(zip(entries, proto.training_info, strict=True))
        infer = manifest.model("infer")
        models = {"infer": _inference_of(proto)}
        content = Content(manifest, models, {}, {}, meta)
        for entry, info in pairs:
            spec = manifest.model(entry["role"])
            assert spec is not None
            models[model_key(spec)] = _Reader(proto.graph, info, entry).read(spec)
            if spec.role == "step":
                _read_values(content, spec, proto.graph, info, entry)
        assert infer is not None
    except _MISFITS as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(
            f"{label}: the metadata {METADATA_KEY!r} does not fit the training info: {e}\n"
            "hint: remove the metadata to read the file as one of another program"
        ) from e
    for model in models.values():
        load(model)  # the file may come from anyone
    return content


def _inference_of(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    del model.training_info[:], model.metadata_props[:]
    return model


class _Reader:
    """Undoes what :class:`_Writer` did."""

    def __init__(
        self, graph: onnx.GraphProto, info: onnx.TrainingInfoProto, entry: Mapping[str, Any]
    ) -> None:
        self._graph, self._info, self._entry = graph, info, entry

    def read(self, spec: ModelSpec) -> onnx.ModelProto:
        entry, algorithm = self._entry, self._info.algorithm
        model = onnx.ModelProto(ir_version=entry["ir_version"], producer_name="onnxtrain")
        for domain, version in entry["opsets"].items():
            model.opset_import.add(domain=domain, version=version)
        front, back = entry["added"]
        graph = model.graph
        graph.node.extend(algorithm.node[front : len(algorithm.node) - back])
        graph.value_info.extend(algorithm.value_info)
        own = {t.name: t for t in algorithm.initializer}
        shared = {t.name: t for t in self._graph.initializer}
        files = {old: new for new, old in entry["names"].items()}
        for name in entry["initializers"]:
            file = files.get(name, _PREFIX + name)
            graph.initializer.append(own[file] if file in own else shared[file])
        _rename(graph, self._original)
        graph.name = algorithm.name
        for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
            for t in tensors:
                values.append(_value_info(t.name, t.dtype, t.shape))
        onnx.checker.check_model(model)
        return model

    def _original(self, name: str) -> str:
        if name in self._entry["names"]:
            return self._entry["names"][name]
        return name.removeprefix(_PREFIX)


def _value_info(name: str, dtype: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = int(dtype_from_name(dtype))
    value.type.tensor_type.shape.SetInParent()
    for size in shape:
        dim = value.type.tensor_type.shape.dim.add()
        if isinstance(size, int):
            dim.dim_value = size
        elif size != "?":
            dim.dim_param = size
    return value


def _read_values(
    content: Content,
    spec: ModelSpec,
    graph: onnx.GraphProto,
    info: onnx.TrainingInfoProto,
    entry: Mapping[str, Any],
) -> None:
    """Read parameters, buffers, state and progress from the initializers."""
    tensors = {t.name: t for t in (*graph.initializer, *info.algorithm.initializer)}
    files = {old: new for new, old in entry["names"].items()}

    def array(name: str) -> np.ndarray:
        return np.array(ir.from_proto(tensors[files.get(name, _PREFIX + name)]).numpy())

    manifest, bindings = content.manifest, {b.value: b.key for b in info.update_binding}
    for w in (*manifest.parameters, *manifest.buffers):
        content.values[w.name] = array(w.name)
    for s in manifest.state:
        content.state[s.name] = array(s.name)
    for t in spec.inputs:
        if t.role == "lr":
            lr = float(array(t.name)[0])
            known = content.meta.get("lr", manifest.optimizer.get("lr", 0.0))
            if np.float32(known) != lr:  # else the digits that float32 does not have stay
                content.meta["lr"] = lr
        elif t.role == "step":
            done = bindings[files[t.name]]
            content.meta["step"] = int(ir.from_proto(tensors[done]).numpy()[0])


_OPTIMIZERS = ("Adagrad", "Adam", "Momentum")


def import_algorithm(
    proto: onnx.ModelProto, *, loss: str | None = None, initialize: bool = False
) -> Content:
    """Return artifacts for the training info of another program.

    The training step is the graph of the model with the algorithm appended. Initializers with an
    ``update_binding`` become parameters, if they belong to the model, and state. Inputs of the
    algorithm become targets.

    Args:
        proto: the model.
        loss: name of the loss. By default the ``y`` of the first Gradient node, else the only
            scalar output of the algorithm.
        initialize: run the initialization graphs; by default the values in the file are used.

    Raises:
        PrepareError: the training info is not valid, or has no step.
    """
    infos = [info for info in proto.training_info if info.update_binding]
    if not infos:
        raise PrepareError("the model has no training step: no training_info has update_binding")
    info = _in_sequence(proto, infos)
    algorithm = info.algorithm
    bindings = _checked_bindings(proto, info)
    load(_combined(proto, algorithm, set()))  # checks sizes and names before tensors are read
    tensors = {t.name: t for t in (*proto.graph.initializer, *algorithm.initializer)}
    arrays = {name: np.array(ir.from_proto(tensors[name]).numpy()) for name in bindings}
    if initialize:
        arrays |= _initial_values(proto, tensors)
    rate = _learning_rate(algorithm, bindings)
    combined = _combined(proto, algorithm, set(bindings) | ({rate} if rate else set()))
    repairs: list[str] = []
    loss = loss or _loss_name(algorithm, set(bindings.values()))
    if loss is None:
        loss = _add_zero(combined.graph)
        repairs.append("the training info has no loss: it is reported as 0")
    by_name = {v.name: v for v in (*combined.graph.output, *combined.graph.value_info)}
    results = list(dict.fromkeys([loss, *bindings.values()]))
    del combined.graph.output[:]
    combined.graph.output.extend(by_name.get(n, onnx.ValueInfoProto(name=n)) for n in results)
    prepared = load_normalized(combined)
    forward = prepared.copy()
    step = _step_model(proto, GradientModel(prepared), bindings, rate)
    infer = inference_model(load(_inference_of(proto)))
    evaluation = [] if repairs else [_loss_model(proto, GradientModel(forward), bindings)]
    built = (step, *evaluation, infer)
    parameters = [t.name for t in step.spec.inputs_of("parameter")]
    manifest = Manifest(
        models=tuple(b.spec for b in built),
        parameters=tuple(
            WeightSpec(n, arrays[n].dtype.name, tuple(arrays[n].shape)) for n in parameters
        ),
        buffers=(),
        state=tuple(
            StateSpec(t.name, t.name, "state", t.dtype, tuple(arrays[t.name].shape), 0.0)
            for t in step.spec.inputs_of("state")
        ),
        optimizer={"name": "TrainingInfo", "lr": _default_rate(rate, tensors)},
        loss={"output": "loss", "name": loss},
        options={"repairs": [*prepared.repairs, *repairs]},
    )
    state = {n: a for n, a in arrays.items() if n not in parameters}
    models = {b.spec.role: b.to_proto() for b in built}
    return Content(manifest, models, {n: arrays[n] for n in parameters}, state, {})


def _in_sequence(
    proto: onnx.ModelProto, infos: Sequence[onnx.TrainingInfoProto]
) -> onnx.TrainingInfoProto:
    """Return one training info that runs several in order, which the standard calls an iteration.

    Each step sees the updates of those before it: the graph of the model is repeated, with names
    that start with ``step2/`` and the new values of variables.
    """
    whole = onnx.TrainingInfoProto()
    whole.CopyFrom(infos[0])
    algorithm = whole.algorithm
    of_model = {x.name for part in (proto.graph.input, proto.graph.initializer) for x in part}
    for number, info in enumerate(infos[1:], 2):
        updated = {b.key: f"step{number}/{b.key}" for b in whole.update_binding}
        for b in whole.update_binding:  # variables: gradients do not flow into the last step
            name = updated[b.key]
            algorithm.node.add(
                op_type="Identity", input=[b.value], output=[name], name=f"{name}.{STOP_GRADIENT}"
            )
        tensors = {t.name: t.SerializeToString() for t in algorithm.initializer}
        bound = {b.key for b in info.update_binding}
        shared = of_model | bound | {x.name for x in info.algorithm.input}
        shared |= {
            t.name
            for t in info.algorithm.initializer
            if tensors.get(t.name) == t.SerializeToString()
        }

        def new(name: str, number: int = number, updated=updated, shared=shared) -> str:
            if not name or name in updated:
                return updated.get(name, name)
            return name if name in shared else f"step{number}/{name}"

        step = onnx.GraphProto(node=proto.graph.node, value_info=proto.graph.value_info)
        results = {b.value for b in info.update_binding}
        step.output.extend(y for y in proto.graph.output if y.name in results)
        for field in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
            getattr(step, field).extend(getattr(info.algorithm, field))
        _rename(step, new)
        declared = {x.name for x in (*algorithm.input, *algorithm.initializer)}
        for field in ("node", "sparse_initializer", "output", "value_info"):
            getattr(algorithm, field).extend(getattr(step, field))
        for field in ("input", "initializer"):
            new_ones = (x for x in getattr(step, field) if x.name not in declared)
            getattr(algorithm, field).extend(new_ones)
        for b in info.update_binding:
            whole.update_binding.add(key=b.key, value=new(b.value))
    return whole


def _checked_bindings(proto: onnx.ModelProto, info: onnx.TrainingInfoProto) -> dict[str, str]:
    """Return the update bindings, each initializer with its new value."""
    algorithm = info.algorithm
    variables = {t.name for t in (*proto.graph.initializer, *algorithm.initializer)}
    outputs = {y.name for y in (*proto.graph.output, *algorithm.output)}
    keys = [b.key for b in info.update_binding]
    problems = [f"{k!r} is bound twice" for k in sorted({k for k in keys if keys.count(k) > 1})]
    for b in info.update_binding:
        if b.key not in variables:
            problems.append(f"{b.key!r} is not an initializer")
        if b.value not in outputs:
            problems.append(f"{b.value!r} is not an output")
    if problems:
        raise PrepareError("update_binding of the training info:\n  " + "\n  ".join(problems))
    return {b.key: b.value for b in info.update_binding}


def _initial_values(
    proto: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]
) -> dict[str, np.ndarray]:
    """Run the initialization graphs; return the values of their bindings."""
    values: dict[str, np.ndarray] = {}
    for info in proto.training_info:
        if not info.initialization_binding:
            continue
        model = onnx.ModelProto(ir_version=proto.ir_version)
        model.opset_import.extend(proto.opset_import)
        model.graph.CopyFrom(info.initialization)
        model.graph.name = model.graph.name or "initialization"
        results = runtime.create(ir.to_proto(load(model)).SerializeToString()).run(None, {})
        outputs = dict(zip((y.name for y in model.graph.output), results, strict=True))
        for b in info.initialization_binding:
            if b.key not in tensors or b.value not in outputs:
                raise PrepareError(
                    f"initialization_binding of {b.key!r} to {b.value!r}: not an initializer, or "
                    "not an output of the initialization graph"
                )
            values[b.key] = outputs[b.value]
    return values


def _learning_rate(algorithm: onnx.GraphProto, bindings: Mapping[str, str]) -> str | None:
    """Return the constant or input that is the learning rate of the first optimizer node."""
    given = {v.name for part in (algorithm.initializer, algorithm.input) for v in part}
    nodes = (n for n in algorithm.node if n.domain == TRAINING_DOMAIN)
    rates = (n.input[0] for n in nodes if n.op_type in _OPTIMIZERS)
    return next((name for name in rates if name in given - bindings.keys()), None)


def _add_zero(graph: onnx.GraphProto) -> str:
    """Add a scalar constant; return its name."""
    taken = _names_in(graph)
    name = next(n for i in itertools.count() if (n := f"loss{i or ''}") not in taken)
    zero = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, float_data=[0.0])
    node = graph.node.add(op_type="Constant", output=[name], name=name)
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=zero)
    return name


def _loss_name(algorithm: onnx.GraphProto, bound: set[str]) -> str | None:
    """Return the name of the loss; ``None`` if the algorithm has no scalar output."""
    for node in algorithm.node:
        if node.domain == TRAINING_DOMAIN and node.op_type == "Gradient":
            return next(a.s.decode() for a in node.attribute if a.name == "y")
    scalars = [
        y.name
        for y in algorithm.output
        if y.name not in bound
        and not y.type.tensor_type.shape.dim
        and ir.DataType(y.type.tensor_type.elem_type) in S.FLOATS
    ]
    if len(scalars) > 1:
        raise PrepareError(
            f"the algorithm has several scalar outputs: {', '.join(scalars)}\n"
            f"hint: {by_caller(f'loss={scalars[0]!r}', f'--loss-output {scalars[0]}')}"
        )
    return scalars[0] if scalars else None


def _combined(
    proto: onnx.ModelProto, algorithm: onnx.GraphProto, variables: set[str]
) -> onnx.ModelProto:
    """Return the model with the algorithm appended and the variables as inputs."""
    combined = _inference_of(proto)
    graph = combined.graph
    for field in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(algorithm, field))
    declared = {x.name for x in graph.input}
    for tensor in list(graph.initializer):
        if tensor.name in variables:
            if tensor.name not in declared:
                value = graph.input.add(name=tensor.name)
                value.type.tensor_type.elem_type = tensor.data_type
                value.type.tensor_type.shape.SetInParent()
                for size in tensor.dims:
                    value.type.tensor_type.shape.dim.add(dim_value=size)
            graph.initializer.remove(tensor)
    return combined


def _step_model(
    proto: onnx.ModelProto, step: GradientModel, bindings: Mapping[str, str], rate: str | None
) -> BuiltModel:
    """Return the model of a training step; its graph has the outputs loss and new values."""
    step.rewrite()
    op, graph = step.op, step.graph
    signature = GraphSignature("step", step.model, op)
    values = {y.name: y for y in graph.outputs}
    loss, inputs = graph.outputs[0], {x.name or "": x for x in graph.inputs}
    if rate is not None:
        lr = signature.input("learning_rate", "lr", ir.DataType.FLOAT, [1])
        old = inputs.pop(rate)
        shape = op.const(list(op.static(old) or ()), ir.DataType.INT64)
        old.replace_all_uses_with(op.Reshape(op.cast(lr, old.dtype), shape))
        graph.sort()
    _declare_inputs(signature, proto, inputs, bindings)
    signature.output("loss", "loss", _scalar(op, loss))
    for key, value in bindings.items():
        role = _role(proto, key, inputs[key])
        signature.output(f"{key}.out", role, values[value], inputs[key])
    return signature.build(op.target)


def _loss_model(
    proto: onnx.ModelProto, forward: GradientModel, bindings: Mapping[str, str]
) -> BuiltModel:
    """Return the model of the loss alone."""
    forward.rewrite()
    graph = forward.graph
    loss, inputs = graph.outputs[0], {x.name or "": x for x in graph.inputs}
    reached = {x for n in ancestor_nodes(list(graph), [loss]) for x in (*n.inputs, *captured(n))}
    inputs = {n: x for n, x in inputs.items() if x in reached or x is loss}
    signature = GraphSignature("eval", forward.model, forward.op)
    _declare_inputs(signature, proto, inputs, bindings)
    signature.output("loss", "loss", _scalar(forward.op, loss))
    return signature.build(forward.op.target)


def _declare_inputs(
    signature: GraphSignature,
    proto: onnx.ModelProto,
    inputs: Mapping[str, ir.Value],
    bindings: Mapping[str, str],
) -> None:
    own = {x.name for x in proto.graph.input}
    for name, x in inputs.items():
        given = "input" if name in own else "target"
        signature.declare([x], _role(proto, name, x) if name in bindings else given)


def _role(proto: onnx.ModelProto, key: str, x: ir.Value) -> str:
    """Return the role of a bound initializer: float tensors of the model are parameters."""
    in_model = any(t.name == key for t in proto.graph.initializer)
    return "parameter" if in_model and S.is_float(x) else "state"


def _scalar(op: OpBuilder, loss: ir.Value) -> ir.Value:
    dims = S.dims_of(loss)
    if dims is None or any(d != 1 for d in dims):
        raise PrepareError(
            f"the loss has more than one element: {S.describe_value(loss)}\n"
            f"hint: name another value: {by_caller('loss=...', '--loss-output ...')}"
        )
    return op.Reshape(loss, op.const([], ir.DataType.INT64)) if dims else loss


def _default_rate(rate: str | None, tensors: Mapping[str, onnx.TensorProto]) -> float:
    """Return the learning rate of the file; 0.001 if it has none, or a constant inside."""
    if rate is None or rate not in tensors:
        return 0.001
    return float(np.array(ir.from_proto(tensors[rate]).numpy()).reshape(-1)[0])
