"""Central differences of an independent loss, and the error of a gradient against them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.wild.double import Double, widened, written_out
from tests.wild.original import Original, mean_square

STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
"""Step sizes relative to the norm of the weights."""
COARSE = (1e-1, 3e-2, 1e-2)
"""The same in float16, where smaller steps are lost in rounding."""
FINE = (1e-4, 3e-5, 1e-5, 3e-6, 1e-6)
"""Steps in float64: kinks are hardly met. The reference computes some operators in float32."""
ELSEWHERE = 1e-2
"""The step, along all weights, after which the float64 file still has to compute the same."""
FEWEST, SECONDS = 4, 12.0
"""Tensors to check one by one: at least this many, more within this many seconds of CPU time."""
SAME, SAME_FLOAT16 = 1e-3, 1e-2
"""Tolerance between a file in float64 and the runtime, relative to its largest output."""
AGAIN = 60.0
"""Seconds of CPU time for a closer check of what disagrees."""
WEAK = 0.01
"""The error of a tensor is relative to its gradient norm, or to this fraction of the largest."""


class Differences:
    """Central differences of the loss of the original file."""

    def __init__(
        self, original: Original, feeds: Mapping[str, np.ndarray], name: str, target: np.ndarray
    ) -> None:
        self.original, self.feeds, self.name, self.target = original, feeds, name, target
        self.checked, self.closer = 0, ""

    def error(self, gradients: Mapping[str, np.ndarray], limit: float) -> float | None:
        """Return the largest disagreement, along all weights together and along each separately.

        Where a run takes long, only some are tried by themselves. What disagrees by more than
        ``limit`` is looked at again, in float64 where the file has only standard operators.
        """
        weights = self.original.weights(list(gradients))
        weights = {n: w for n, w in weights.items() if w.dtype.kind in "fV"}
        if not weights:
            return None
        self.session = self.original.adjustable(list(weights))
        given = {x.name for x in self.session.get_inputs()}
        given |= {x.name for x in self.session.get_overridable_initializers()}
        self.weights = {n: w for n, w in weights.items() if n in given}
        self.half = any(w.dtype.itemsize == 2 for w in self.weights.values())
        whole = {n: gradients[n].astype(np.float64) for n in self.weights}
        norms = {n: float(np.linalg.norm(g)) * _size(weights[n]) for n, g in whole.items()}
        top = max(norms.values(), default=0.0)
        if not top:
            return None
        start = time.process_time()
        errors = [(self._along(whole), 1.0, whole)]
        each = max(time.process_time() - start, 1e-6)
        chosen = sorted((n for n in norms if norms[n]), key=lambda n: -norms[n])
        affordable = max(FEWEST, int(SECONDS / each))
        chosen = chosen[:: -(-len(chosen) // affordable)]
        self.checked = len(chosen)
        for n in chosen:
            share = min(1.0, norms[n] / (WEAK * top))
            errors.append((self._along({n: whole[n]}) * share, share, {n: whole[n]}))
        return self._again(errors, limit, whole)

    def _again(
        self,
        errors: list[tuple[float, float, dict[str, np.ndarray]]],
        limit: float,
        whole: Mapping[str, np.ndarray],
    ) -> float:
        """Return the largest error after a closer look at those over the limit, worst first."""
        errors = sorted(errors, key=lambda e: -e[0])
        end = time.process_time() + AGAIN
        if errors[0][0] <= limit:
            return errors[0][0]
        wide = self._wide(whole)
        if wide is None and self.half:
            return errors[0][0]
        done = [0.0]
        while errors and errors[0][0] > limit and time.process_time() < end:
            _, share, ways = errors.pop(0)
            again = self._fitted(ways) if wide is None else self._in_float64(wide, ways)
            done.append(again * share)
        self.closer = "float64" if wide is not None else "fit"
        return max([*done, *(e for e, *_ in errors)])

    def _wide(self, whole: Mapping[str, np.ndarray]) -> Double | None:
        """Return the file in float64, if the reference computes what the runtime does.

        Fused operators are written out in standard ones. That it is the same function is seen with
        the weights of the file and with others.
        """
        makers = (lambda: widened(self.original.proto), lambda: written_out(self.original.path))
        for maker in makers:
            wide = maker()
            if wide is not None and self._is_same(wide, whole):
                return wide
        return None

    def _is_same(self, wide: Double, whole: Mapping[str, np.ndarray]) -> bool:
        unit = self._unit(whole)
        for h in (0.0, ELSEWHERE):
            moved = {n: self.weights[n] + np.float32(h) * d for n, d in unit.items()}
            own = {n: w.astype(self.weights[n].dtype) for n, w in moved.items()}
            feeds = {**self.feeds, **own}
            want = np.asarray(self.session.run([self.name], feeds)[0])
            try:
                seen = np.asarray(wide.run([self.name], feeds)[0])
            except Exception:  # the reference has no common class for what it cannot compute
                return False
            near = (SAME_FLOAT16 if self.half else SAME) * np.abs(want).max()
            if seen.shape != want.shape or np.abs(seen - want).max() > near:
                return False
        return True

    def _in_float64(self, wide: Double, ways: Mapping[str, np.ndarray]) -> float:
        unit = self._unit(ways)
        ratios = [self._ratio(wide, np.float64, ways, unit, h) for h in FINE]
        return abs(settled(FINE, ratios) - 1.0)

    def _fitted(self, ways: Mapping[str, np.ndarray]) -> float:
        """Return the error of the limit of many differences, by least squares in the step."""
        unit, fits = self._unit(ways), []
        steps = np.geomspace(1 / 3, 3, 96)
        for middle in (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5):
            ratios = np.array(
                [self._ratio(self.session, None, ways, unit, h) for h in middle * steps]
            )
            for exponents in ((1, 3), (1, 3, 5), (1, 2)):  # the last one is for kinks
                # Times the step: rounding matters less in larger ones.
                powers = np.stack([steps**i for i in exponents], axis=1)
                answer = np.linalg.lstsq(powers, ratios * steps, rcond=None)[0]
                spread = np.std(powers @ answer - ratios * steps)
                doubt = float(np.sqrt(np.linalg.inv(powers.T @ powers)[0, 0]) * spread)
                fits.append((doubt, abs(float(answer[0]) - 1.0)))
        return min(fits)[1]

    def _along(self, ways: Mapping[str, np.ndarray]) -> float:
        """Return the relative error of the derivative along a direction."""
        unit = self._unit(ways)
        steps = COARSE if self.half else STEPS
        ratios = [self._ratio(self.session, None, ways, unit, h) for h in steps]
        return abs(settled(steps, ratios) - 1.0)

    def _unit(self, ways: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the direction, where each weight moves in units of its own size."""
        sizes = {n: _size(self.weights[n]) for n in ways}
        length = np.sqrt(sum(np.square(g * sizes[n]).sum() for n, g in ways.items()))
        return {n: g * sizes[n] ** 2 / length for n, g in ways.items()}

    def _ratio(
        self,
        session: Any,
        dtype: Any,
        ways: Mapping[str, np.ndarray],
        unit: Mapping[str, np.ndarray],
        h: float,
    ) -> float:
        """Return the difference of the loss beside what the gradient says."""
        values, moved = [], []
        for sign in (1, -1):
            feeds = dict(self.feeds)
            for n, d in unit.items():
                moved_to = self.weights[n].astype(np.float64) + sign * h * d
                feeds[n] = np.asarray(moved_to, dtype or self.weights[n].dtype)
            moved.append({n: feeds[n].astype(np.float64) for n in unit})
            values.append(mean_square(session.run([self.name], feeds)[0], self.target))
        # Along what was really moved, after rounding to the type of the file.
        want = sum(float((ways[n] * (moved[0][n] - moved[1][n])).sum()) for n in unit)
        if not want or (values[0] == values[1] and dtype is None):
            return np.inf  # the step is too small to be seen; in float64 it is seen
        return (values[0] - values[1]) / want


def settled(steps: Sequence[float], ratios: Sequence[float]) -> float:
    """Return the limit of differences by steps that become smaller.

    Errors fall with the square of the step until rounding takes over: neighbors are extrapolated,
    and of all estimates those that change least from one step to the next count, whatever they are.
    """
    squares = [(a / b) ** 2 for a, b in itertools.pairwise(steps)]
    better = [
        (k * fine - coarse) / (k - 1)
        for coarse, fine, k in zip(ratios, ratios[1:], squares, strict=False)
    ]
    pairs = [
        (abs(a - b), (a + b) / 2)
        for row in (ratios, better)
        for a, b in itertools.pairwise(row)
        if np.isfinite([a, b]).all()
    ]
    return min(pairs)[1] if pairs else np.inf


def _size(weight: np.ndarray) -> float:
    """Return the usual size of a weight's elements."""
    return float(np.sqrt(np.square(weight.astype(np.float64)).mean())) or 1.0
