"""Where an infinity or a NaN comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx

from onnxtrain.runtime import session as runtime
from onnxtrain.training.layouts import model_of

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer


def is_finite(array: np.ndarray) -> bool:
    """Return whether there is neither an infinity nor a NaN; whole numbers are always finite."""
    if array.dtype.kind in "iubUSO":
        return True
    return bool(np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array).all())


def first_bad(named: Iterable[tuple[str, np.ndarray]]) -> str | None:
    """Return the first name whose tensor is not finite, with what is wrong with it."""
    for name, array in named:
        if not is_finite(array):
            return f"{name} ({_describe(array)})"
    return None


def bad_loss(
    trainer: Trainer,
    feeds: Mapping[str, np.ndarray],
    computed: Mapping[str, np.ndarray],
    *,
    debug: bool,
) -> str:
    """Say why the loss of a batch is not finite; the trainer has not taken the step over."""
    head = f"the loss of step {trainer.global_step + 1} is {float(computed[trainer.loss_name])}"
    values = [(f"parameter {n!r}", trainer.view(n)) for n in trainer.parameters]
    values += [(f"buffer {n!r}", trainer.view(n)) for n in trainer.buffers]
    batch = [(f"{n!r} of the batch", a) for n, a in feeds.items()]
    outputs = [(f"output {n!r}", a) for n, a in computed.items() if n != trainer.loss_name]
    first = first_bad([*batch, *values, *outputs])
    lines = [head, f"  first tensor that is not finite: {first or 'the loss itself'}"]
    if debug:
        lines.append(f"  {find_node(*trainer.debug_feeds(feeds)) or 'no node makes it'}")
    else:
        lines.append("hint: debug_nan=True finds the node; the weights are those before this step")
    return "\n".join(lines)


def bad_update(trainer: Trainer, feeds: Mapping[str, np.ndarray]) -> str | None:
    """Say which new value or gradient of a computed step is not finite, if one is."""
    first = first_bad(trainer.pending_updates())
    if first is None or trainer.manifest.options.get("loss_scale"):  # such a step is skipped
        return None
    node = find_node(*trainer.debug_feeds(feeds))
    return (
        f"step {trainer.global_step + 1} has a finite loss, but not a finite update\n"
        f"  first tensor that is not finite: {first}\n  {node or 'no node makes it'}"
    )


def bad_weights(trainer: Trainer) -> dict[str, str]:
    """Return parameters and buffers that are not finite, with what is wrong with each."""
    views = {n: trainer.view(n) for n in (*trainer.parameters, *trainer.buffers)}
    return {n: _describe(a) for n, a in views.items() if not is_finite(a)}


def find_node(source: bytes | str, feeds: Mapping[str, np.ndarray]) -> str | None:
    """Run a model with every value as an output; say which node makes the first bad one.

    A NaN counts more than an infinity, which a mask may hold on purpose.

    Args:
        source: the model, as a runtime takes it.
        feeds: all of its inputs.
    """
    model = model_of(source)
    names = [y for node in model.graph.node for y in node.output if y]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    ort = runtime.runtime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = runtime.in_place_of(source, model.SerializeToString())
    session = runtime.create(plain, options=options)
    values = dict(zip(names, runtime.run(session, names, dict(feeds)), strict=True))
    known = {**feeds, **values}
    for bad in (_has_nan, _has_infinity):
        for node in model.graph.node:
            given = any(bad(known[x]) for x in node.input if x in known)
            for y in node.output:
                if not given and y in values and bad(values[y]):
                    return _explain(node, y, known)
    return None


def _explain(node: onnx.NodeProto, output: str, known: Mapping[str, np.ndarray]) -> str:
    lines = [f"node {node.name!r} ({node.op_type}) gives {output!r} ({_describe(known[output])})"]
    lines += [f"  from {x!r} ({_describe(known[x])})" for x in node.input if x in known]
    return "\n".join(lines)


def _describe(array: np.ndarray) -> str:
    text = f"{array.dtype}{list(array.shape)}"
    if array.dtype.kind != "f" or not array.size:
        return text
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if nans or infinities:
        return f"{text}, {nans} NaN, {infinities} infinite"
    return f"{text}, {array.min():.4g} to {array.max():.4g}"


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def _has_infinity(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isinf(array).any())
