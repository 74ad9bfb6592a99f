"""Optimizers over sequences of tensors, in standard operators.

The signature is the old one: ``learning_rate``, ``step``, ``params``, ``gradients`` and moments.
Stock runtimes update nothing in place, so the new values come out as ``params.out``,
``first_order_moments.out`` ..., after the flag that used to be the only output.

Loops over sequences of tensors whose length is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain import optim
from onnxtrain.compat.ort.errors import OrtError, OrtIndexError
from onnxtrain.compat.ort.onnxblock.blocks import Block
from onnxtrain.compat.ort.onnxblock.model import active, opset_of, splice
from onnxtrain.compat.ort.onnxblock.models import ForwardBlock
from onnxtrain.graph.builder import OpBuilder

Step = Callable[..., Sequence[ir.Value]]


def map_sequences(
    op: OpBuilder, sequences: Sequence[ir.Value], step: Step, *, results: int
) -> list[ir.Value]:
    """Return the sequences of ``step(body, *elements)`` over the elements at each place."""
    first = _element(sequences[0])
    length = op.SequenceLength(sequences[0])
    empty = [op.SequenceEmpty(dtype=int(first.dtype)) for _ in range(results)]
    body = op.body([op.const(0), op.const(True), *empty])
    at, go, *collected = body.graph.inputs
    elements = [_take(body, s, at) for s in sequences]
    new = step(body, *elements)
    grown = [body.SequenceInsert(s, x) for s, x in zip(collected, new, strict=True)]
    body.graph.outputs.extend([body.Identity(go), *grown])
    loop_outputs = op.Loop(length, op.const(True), *empty, body=body.graph, _outputs=results)
    values = list(loop_outputs) if isinstance(loop_outputs, tuple) else [loop_outputs]
    for value in values:
        value.type = ir.SequenceType(ir.TensorType(first.dtype))
    return values


def clip_sequence(op: OpBuilder, gradients: ir.Value, max_norm: float) -> ir.Value:
    """Scale all elements so that their joint norm is at most ``max_norm``."""
    zero = op.const(0.0, ir.DataType.FLOAT)
    body = op.body([op.const(0), op.const(True), zero])
    at, go, total = body.graph.inputs
    g = _take(body, gradients, at)
    square = body.cast(body.ReduceSum(body.Mul(g, g), keepdims=0), ir.DataType.FLOAT)
    body.graph.outputs.extend([body.Identity(go), body.Add(total, square)])
    squares = op.Loop(op.SequenceLength(gradients), op.const(True), zero, body=body.graph)
    factor = op.Div(max_norm, op.Add(op.Sqrt(squares), 1e-6))
    factor = op.Where(op.Less(factor, 1.0), factor, 1.0)
    (clipped,) = map_sequences(
        op, [gradients], lambda b, x: [b.Mul(x, b.cast(factor, x.dtype))], results=1
    )
    return clipped


def _element(sequence: ir.Value) -> ir.TensorType:
    kind = sequence.type
    assert isinstance(kind, ir.SequenceType)
    assert isinstance(kind.elem_type, ir.TensorType)
    return kind.elem_type


def _take(op: OpBuilder, sequence: ir.Value, at: ir.Value) -> ir.Value:
    value = op.SequenceAt(sequence, at)
    value.type = ir.TensorType(_element(sequence).dtype)
    return value


_FLAG = np.array([True])


class ClipGradNorm(Block):
    """Gradients scaled so that their joint norm is at most ``max_norm``."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = max_norm

    def build(self, gradients_name: str) -> Any:
        """Return the name of the sequence of scaled gradients."""
        _need_sequences(self.base)

        def build(op: Any, gradients: ir.Value) -> ir.Value:
            return clip_sequence(op, gradients, self.max_norm)

        return splice(active(), "clip_grad_norm", [gradients_name], build)


class _SequenceOptimizer(Block):
    """An optimizer of the library, applied to each element of sequences."""

    def _run(self, optimizer: optim.Optimizer, lr: str, step: str | None, names: list[str]) -> str:
        """Return the name of the flag; new values of all but the gradients are registered."""
        _need_sequences(self.base)
        accessor = active()
        slots = [s.name for s in optimizer.slots("p", (1,), ir.DataType.FLOAT)]
        kept = [names[0], *names[2:]]

        def build(op: Any, rate: ir.Value, *values: ir.Value) -> tuple[ir.Value, ...]:
            number, sequences = (op.const([1]), values) if step is None else (values[0], values[1:])

            def update(body: Any, p: ir.Value, g: ir.Value, *moments: ir.Value) -> list[ir.Value]:
                state = {f"p.{slot}": m for slot, m in zip(slots, moments, strict=True)}
                new, new_state = optimizer.apply(body, {"p": p}, {"p": g}, state, rate, number)
                return [new["p"], *(new_state[f"p.{slot}"] for slot in slots)]

            updated = map_sequences(op, sequences, update, results=len(kept))
            return op.Identity(op.const(_FLAG)), *updated

        inputs = [lr, *([] if step is None else [step]), *names]
        outputs = [accessor.fresh("updated_flag"), *(f"{n}.out" for n in kept)]
        flag, *updates = splice(accessor, "optimizer", inputs, build, outputs)
        accessor.updates += updates
        return flag


class SGDOptimizer(_SequenceOptimizer):
    """Plain gradient descent."""

    def build(self, learning_rate_name: str, params_name: str, gradients_name: str) -> str:
        """Return the name of the flag that says that parameters were updated."""
        return self._run(optim.SGD(), learning_rate_name, None, [params_name, gradients_name])


class AdamWOptimizer(_SequenceOptimizer):
    """Adam with decoupled weight decay, in the form of Hugging Face."""

    def __init__(
        self,
        bias_correction: bool | None = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = 1e-6,
        weight_decay: float | None = 0.0,
    ) -> None:
        super().__init__()
        self.settings = adamw_settings(bias_correction, betas, eps, weight_decay)

    def build(
        self,
        learning_rate_name: str,
        step_name: str,
        parameter_sequence_name: str,
        gradient_sequence_name: str,
        first_order_moment_sequence_name: str,
        second_order_moment_sequence_name: str,
    ) -> str:
        """Return the name of the flag that says that parameters were updated."""
        names = [
            parameter_sequence_name,
            gradient_sequence_name,
            first_order_moment_sequence_name,
            second_order_moment_sequence_name,
        ]
        return self._run(self.settings, learning_rate_name, step_name, names)


class OptimizerBlock(ForwardBlock):
    """The whole optimizer model; called with what ``TrainingBlock.parameters()`` gives."""

    settings: optim.Optimizer
    """The library's optimizer that computes the same."""
    moments: Sequence[str] = ("first_order_moments",)

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__()
        self.clip_grad = clip_grad

    def build(
        self, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
    ) -> str:
        """Return the name of the flag that says that parameters were updated."""
        trainable, _ = parameters
        if not trainable:
            raise OrtIndexError("The optimizer has no trainable parameter\nhint: use requires_grad")
        graph = self.base.graph
        for name, dtype in (
            ("learning_rate", onnx.TensorProto.FLOAT),
            ("step", onnx.TensorProto.INT64),
        ):
            kind = graph.input.add(name=name).type.tensor_type
            kind.elem_type = dtype
            kind.shape.dim.add(dim_value=1)
        for name in ("params", "gradients", *self.moments):
            element = graph.input.add(name=name).type.sequence_type.elem_type
            element.tensor_type.elem_type = trainable[0].data_type
        gradients = "gradients" if self.clip_grad is None else self.clip_grad("gradients")
        return self._update(gradients)

    def _update(self, gradients: str) -> str:
        raise NotImplementedError


class AdamW(OptimizerBlock):
    """Adam with decoupled weight decay, in the form of Hugging Face."""

    moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Block | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._optimizer = AdamWOptimizer(bias_correction, betas, eps, weight_decay)
        self.settings = self._optimizer.settings

    def _update(self, gradients: str) -> str:
        return self._optimizer("learning_rate", "step", "params", gradients, *self.moments)


class SGD(OptimizerBlock):
    """Plain gradient descent; the moment input is there as ever, and not used."""

    settings = optim.SGD()

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__(clip_grad)
        self._optimizer = SGDOptimizer()

    def _update(self, gradients: str) -> str:
        return self._optimizer("learning_rate", "params", gradients)


def adamw_settings(
    bias_correction: bool | None,
    betas: tuple[float, float],
    eps: float | None,
    weight_decay: float | None,
) -> optim.AdamW:
    """Return the library's AdamW with the old defaults and the old form."""
    return optim.AdamW(
        form="hf",
        betas=(float(betas[0]), float(betas[1])),
        eps=1e-6 if eps is None else float(eps),
        weight_decay=0.0 if weight_decay is None else float(weight_decay),
        correct_bias=bool(bias_correction),
    )


def _need_sequences(model: onnx.ModelProto) -> None:
    if opset_of(model) < 13:
        raise OrtError(
            f"Sequences in loops need opset 13, the model has {opset_of(model)}\n"
            "hint: onnxblock.empty_base() without opset_version"
        )
