"""Distill a model into a smaller one: build artifacts with a teacher, or store its logits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.artifacts.build import build
from onnxtrain.artifacts.directory import Artifacts
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import Source, load
from onnxtrain.losses import Distillation, LossLike, LossTerm
from onnxtrain.runtime import session as runtime


def distill(
    student: Source,
    teacher: Any,
    *,
    loss: LossLike | None = "cross_entropy",
    weight: float = 0.5,
    temperature: float = 2.0,
    axis: int = -1,
    output: str | None = None,
    teacher_output: str | None = None,
    features: Mapping[str, str] | None = None,
    classes: int | None = None,
    **options: Any,
) -> Artifacts:
    """Return training artifacts of a student that learns from a teacher.

    The loss is ``(1 - weight)`` times the loss of the task plus ``weight`` times
    :class:`onnxtrain.losses.Distillation`. The teacher is part of the training model only: what
    ``Trainer.export`` writes is the student.

    >>> student, teacher = (onnxtrain.examples.digits_model(hidden=n) for n in (8, 64))
    >>> artifacts = onnxtrain.distill(student, teacher, optimizer="adamw")
    >>> [p.name for p in artifacts.manifest.parameters]
    ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']

    Args:
        student: the model to train.
        teacher: a model with the same inputs, which may be quantized; or ``None`` if batches hold
            its logits as ``teacher_logits``, see :func:`teacher_logits`.
        loss: the loss of the task; ``None`` learns from the teacher only.
        weight: weight of the teacher, from 0 to 1.
        temperature: above 1, small probabilities of the teacher count more.
        axis: the axis of the classes in the logits.
        output: the student's output with logits; needed if it has several.
        teacher_output: the same of the teacher.
        features: values of the student and of the teacher that are to be equal, by name.
        classes: number of classes of the teacher, if the student has more: after
            ``replace_head(add_classes=)``, the model before teaches its classes.
        options: further options of :func:`onnxtrain.build`.
    """
    if not 0.0 <= weight <= 1.0:
        raise PrepareError(f"weight must be from 0 to 1: {weight}")
    features = dict(features or {})
    if output is None and features:
        graph = load(student).graph
        output = next((y.name for y in graph.outputs if y.name == "logits"), graph.outputs[0].name)
    distillation = Distillation(
        teacher=teacher,
        temperature=temperature,
        axis=axis,
        output=teacher_output,
        features=features,
        classes=classes,
    )
    read = None if output is None else [output, *features]
    terms: list[LossTerm] = [LossTerm(distillation, output=read, weight=weight)]
    if loss is not None:
        task = loss if isinstance(loss, LossTerm) else LossTerm(loss, output=output)
        terms.insert(0, dataclasses.replace(task, weight=task.weight * (1.0 - weight)))
    else:
        terms = [dataclasses.replace(terms[0], weight=1.0)]
    return build(student, loss=terms, **options)


def teacher_logits(
    teacher: Any,
    data: Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
    *,
    output: str | None = None,
    batch_size: int = 64,
    threads: int | None = None,
) -> np.ndarray:
    """Compute the logits of a teacher once, into a ``.npy`` file; return it, mapped.

    Pass the array to ``fit`` as ``teacher_logits``, beside the inputs and labels.

    Args:
        teacher: the model.
        data: the inputs of all rows, by name.
        path: the file to write.
        output: the output with the logits; by default the first.
        batch_size: rows per run.
        threads: number of CPU threads.
    """
    session = runtime.create_for(load(teacher), threads=threads)
    inputs = [x.name for x in session.get_inputs()]
    missing = [n for n in inputs if n not in data]
    if missing:
        raise PrepareError(f"the teacher reads {', '.join(missing)}, which the data does not have")
    name = output or session.get_outputs()[0].name
    rows = len(data[inputs[0]])
    stored: np.ndarray | None = None
    for start in range(0, rows, batch_size):
        feeds = {n: data[n][start : start + batch_size] for n in inputs}
        (part,) = runtime.run(session, [name], feeds)
        if stored is None:
            shape = (rows, *part.shape[1:])
            stored = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        stored[start : start + batch_size] = part
    if stored is None:
        raise PrepareError("the data has no rows")
    stored.flush()
    return np.load(path, mmap_mode="r")
