"""What a run could do without, and what it would take then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from onnxtrain.artifacts import Artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.planning.parts import Run

Rebuild = Callable[..., Artifacts]


@dataclasses.dataclass(frozen=True)
class Way:
    """Another way to train the same model.

    Attributes:
        name: what to ask for, as a user would write it.
        peak: predicted bytes.
        note: what it costs.
    """

    name: str
    peak: int
    note: str = ""


def ways(
    run: Run,
    symbols: Mapping[str, int],
    batch: str | None,
    budget: int | None,
    rebuild: Rebuild | None,
    adapt: Rebuild | None,
) -> Iterator[Way]:
    """Return ways that take less, the mildest first.

    Args:
        run: as it was asked for.
        symbols: sizes.
        batch: the symbol of the batch, if there is one.
        budget: bytes that there are; without it, the batch is halved.
        rebuild: builds the artifacts with other options, if there is a model to build from.
        adapt: builds them with low-rank adapters.
    """
    yield from _smaller(run, symbols, batch, budget, "")
    if rebuild is None:
        return
    again = _built(lambda: rebuild(recompute="auto"))
    if again is not None:
        yield Way('recompute="auto"', _peak(again, symbols), "a forward pass more for each step")
    plain = _built(lambda: rebuild(optimizer="sgd"))
    if plain is not None and run.artifacts.state:
        yield Way('optimizer="sgd"', _peak(plain, symbols), "no state; it may learn slower")
    if again is not None:
        yield from _smaller(again, symbols, batch, budget, 'recompute="auto", ')
    if adapt is not None and (few := _built(adapt)) is not None:
        yield Way(
            "lora(rank=8)", _peak(few, symbols), "adapters only; the weights stay as they are"
        )


def _smaller(
    run: Run, symbols: Mapping[str, int], batch: str | None, budget: int | None, first: str
) -> Iterator[Way]:
    """Return the run with the largest batch that fits, its gradients accumulated."""
    whole = 1 if batch is None else symbols.get(batch, 1)
    if batch is None or whole < 2:
        return
    fitting = whole // 2
    while budget is not None and fitting > 1 and _peak(run, {**symbols, batch: fitting}) > budget:
        fitting //= 2
    parts = run.parts({**symbols, batch: fitting})
    extra = parts["trained weights"] if run.layout == "vector" else 0
    times = -(-whole // fitting)
    name = f"{first}batch {fitting}, accumulate={times}"
    yield Way(name, sum(parts.values()) + extra, "the same update from smaller batches")


def _built(make: Callable[[], Artifacts]) -> Run | None:
    try:
        return Run(make())
    except OnnxTrainError:
        return None  # not for this model


def _peak(run: Run, symbols: Mapping[str, int]) -> int:
    return sum(run.parts(symbols).values())
