"""Check the first steps on a device: they are run on the CPU as well, and compared.

A device that nobody has tested may compute a wrong kernel, or read values of an earlier step. The
second step shows the latter: its loss depends on everything that the first one has written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxtrain.errors import VerificationError, by_caller
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.compare import difference
from onnxtrain.runtime.devices import Device, find
from onnxtrain.training.engine import StepEngine

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

Arrays = Mapping[str, np.ndarray]
_STEPS = 2
_LOSS_RTOL, _LOSS_ATOL = 1e-3, 1e-5
# Adam divides gradients by their size: gradients that are rounding errors give steps of full size.
_UPDATE_RTOL = 0.25


class FirstSteps:
    """Runs the first steps of a trainer on the CPU, too.

    The CPU starts every step from the values of the device, so that the trainer may load weights
    between two steps.

    Args:
        trainer: whose steps are checked.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._cpu: StepEngine | None = None
        self._before: dict[str, np.ndarray] = {}
        self._left = _STEPS

    def start(self) -> None:
        """Take over the values of the device, before the first batch of a step."""
        trainer = self._trainer
        if self._cpu is None:
            self._cpu = StepEngine(trainer.artifacts, trainer.layout, threads=trainer.threads)
        for name in (*trainer.artifacts.values, *trainer.artifacts.state):
            self._cpu.write(name, trainer.view(name))
        self._before = {n: np.array(trainer.view(n)) for n in trainer.parameters}

    def compute(self, feeds: Arrays, control: Arrays, outputs: Arrays) -> None:
        """Compare loss and metrics of a batch.

        Raises:
            VerificationError: with the first node that differs.
        """
        assert self._cpu is not None
        expected = self._cpu.compute({**feeds, **control})
        names = [t.name for t in self._cpu.spec.outputs_of("loss", "metric")]
        for name in names:
            a, b = np.asarray(outputs[name], np.float64), np.asarray(expected[name], np.float64)
            if not np.allclose(a, b, _LOSS_RTOL, _LOSS_ATOL, equal_nan=True):
                model, values = self._trainer.debug_feeds(feeds)
                node = first_difference(model, values, self._trainer.device_entry)
                raise self._error(
                    f"{name} is {a.tolist():.6g}, on the CPU {b.tolist():.6g}"
                    if a.ndim == 0
                    else f"{name} differs",
                    node or "no node differs if they run alone: the device reads old values",
                )

    def commit(self) -> None:
        """Make the results of a batch current."""
        assert self._cpu is not None
        self._cpu.commit()

    def update(self, control: Arrays) -> bool:
        """Update and compare all values; return whether this was the last step to check.

        Raises:
            VerificationError: with the names of the parameters that differ.
        """
        assert self._cpu is not None
        self._cpu.update_parameters(control)
        view, cpu = self._trainer.view, self._cpu.view
        stale: list[str] = []
        error = change = 0.0
        for name, old in self._before.items():
            new, wanted = _wide(view(name)), _wide(cpu(name))
            moved = float(np.square(wanted - _wide(old)).sum())
            if moved and np.array_equal(new, _wide(old)):
                stale.append(name)
            error += float(np.square(new - wanted).sum())
            change += moved
        if stale:
            raise self._error("parameters do not change", ", ".join(map(repr, stale)))
        if math.sqrt(error) > _UPDATE_RTOL * math.sqrt(change):
            raise self._error(
                "the parameters differ from those of the CPU",
                f"by {math.sqrt(error / max(change, 1e-30)):.2g} times the change of the step",
            )
        self._left -= 1
        return not self._left

    def _error(self, what: str, where: str) -> VerificationError:
        step, device = self._trainer.global_step + 1, self._trainer.device
        return VerificationError(
            f"step {step} on {device}: {what}\n  {where}\nhint: `onnxtrain check-device {device}` "
            "writes a report for the issue tracker; "
            + by_caller("verify=False trains anyway", "--device cpu trains on the CPU")
        )


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def first_difference(source: bytes | str, feeds: Arrays, device: Device) -> str | None:
    """Return the first node whose values on a device differ from those on the CPU, or ``None``.

    Args:
        source: the model.
        feeds: all of its inputs.
        device: where it runs besides the CPU.
    """
    model = runtime.load_graph(source)
    names = [y for node in model.graph.node for y in node.output if y]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    data = runtime.with_weights_folder(source, model.SerializeToString())
    there, here = (
        dict(zip(names, runtime.run(_session(data, d), names, dict(feeds)), strict=True))
        for d in (find(device, allow_cpu_fallback=True), find("cpu"))
    )
    return next(_differences(model, here, there), None)


def _session(data: bytes, device: Device) -> Any:
    return runtime.create(data, device=device)


def _differences(model: onnx.ModelProto, here: Arrays, there: Arrays) -> Iterator[str]:
    for node, y in itertools.chain.from_iterable(
        ((node, y) for y in node.output if y) for node in model.graph.node
    ):
        why = difference(here[y], there[y])
        if why:
            yield f"first node that differs: {node.op_type} {node.name!r}: {y!r} {why}"


__all__ = ["FirstSteps", "first_difference"]
