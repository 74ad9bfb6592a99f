"""Optimizers over sequences of tensors, in standard operators.

The signature is the old one: ``learning_rate``, ``step``, ``params``, ``gradients`` and moments.
Stock runtimes update nothing in place, so the new values come out as ``params.out``,
``first_order_moments.out`` ..., after the flag that used to be the only output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain import optim
from onnxtrain.compat.ort.errors import OrtError, OrtIndexError
from onnxtrain.compat.ort.onnxblock.accessor import active, opset_of
from onnxtrain.compat.ort.onnxblock.block import Block
from onnxtrain.compat.ort.onnxblock.graph import splice
from onnxtrain.compat.ort.onnxblock.models import ForwardBlock
from onnxtrain.compat.ort.onnxblock.optim.sequences import clip_sequence, map_sequences

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
