"""Exceptions of this library, and the wording of hints.

A message states what is wrong (the user's names in quotes), where (node, dtype, shape), and how to
fix it on a line that starts with ``hint:``. Hints use the arguments of the call that the user made:
``freeze`` in ``build``, otherwise ``wrt``; on the command line, flags (:func:`argument`,
:func:`by_caller`).
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Generator, Iterable


class OnnxTrainError(Exception):
    """Base of all errors of this library."""


class LoadError(OnnxTrainError, ValueError):
    """A file is not a valid model, is hostile, or exceeds a limit."""


class SaveError(OnnxTrainError, ValueError):
    """A model cannot be serialized, or the file system rejects the write."""


class PrepareError(OnnxTrainError, ValueError):
    """A model cannot be brought to the normal form, or an argument is invalid."""


class ShapeError(OnnxTrainError, ValueError):
    """A required rank or dimension is unknown or does not match."""


class LabelError(ShapeError):
    """A label is not a class of the model, or an index is not in its embedding table."""


class UndifferentiableError(OnnxTrainError, NotImplementedError):
    """A requested gradient does not exist or has no rule."""


class LoweringError(OnnxTrainError):
    """A model cannot be expressed in the operators of the target."""


class ProfileError(LoweringError):
    """A runtime profile does not exist, or its file is invalid."""


class ProbeError(LoweringError):
    """Probe models or their results cannot be read, or a runtime cannot be probed."""


class VerificationError(LoweringError):
    """A lowered model and the original have different results; nothing was written."""


class DefectError(OnnxTrainError):
    """The runtime rejects a generated model: a bug of this library."""


class CheckpointError(OnnxTrainError, ValueError):
    """A checkpoint, manifest or artifact is invalid or does not match the model."""


class ParameterError(OnnxTrainError, KeyError):
    """A name is not that of a trainable parameter."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError has the repr


class NonFiniteError(OnnxTrainError, ArithmeticError):
    """A loss, gradient or parameter is infinite or NaN."""


class UncopiableError(OnnxTrainError, TypeError):
    """An object that owns sessions or memory cannot be pickled or copied."""


class BusyError(OnnxTrainError, RuntimeError):
    """A trainer is in use by another thread, or a directory by another run."""


class CompatError(OnnxTrainError):
    """A call of an older API has no equivalent on a stock runtime."""


class MissingExtraError(OnnxTrainError, ImportError):
    """An optional dependency is not installed."""


_FREEZES: contextvars.ContextVar[bool] = contextvars.ContextVar("freezes", default=False)


@contextlib.contextmanager
def hints_name_freeze() -> Generator[None]:
    """Make hints mention ``freeze`` instead of ``wrt`` inside this context."""
    token = _FREEZES.set(True)
    try:
        yield
    finally:
        _FREEZES.reset(token)


def exclusion_hint(what: str) -> str:
    """Return a hint how to exclude ``what`` from differentiation."""
    return f"name {what} in `freeze`" if _FREEZES.get() else f"leave {what} out of `wrt`"


_FLAGS: contextvars.ContextVar[bool] = contextvars.ContextVar("flags", default=False)


@contextlib.contextmanager
def hints_name_flags() -> Generator[None]:
    """Make hints name flags of the command line instead of Python arguments in this context."""
    token = _FLAGS.set(True)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def by_caller(python: str, command_line: str) -> str:
    """Return the text for a caller in Python, or the one for the command line."""
    return command_line if _FLAGS.get() else python


def argument(name: str, value: object = True) -> str:
    """Return how the caller passes an option.

    >>> argument("batch_size", 32), argument("schedule", "cosine")
    ('batch_size=32', "schedule='cosine'")
    >>> with hints_name_flags():
    ...     argument("batch_size", 32), argument("resume")
    ('--batch-size 32', '--resume')
    """
    flag = f"--{name.replace('_', '-')}"
    return by_caller(f"{name}={value!r}", flag if value is True else f"{flag} {value}")


def term_of_output(loss: str, output: str | None) -> str:
    """Return how the caller lets a loss read an output or an inner value."""
    return by_caller(f"loss=LossTerm({loss!r}, output={output!r})", f"--loss-output {output}")


def expected_one_of(name: str, known: Iterable[str]) -> str:
    """Return ``(expected one of ...)`` for an unknown name: the known ones, nearest first."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=len(names), cutoff=0.4)
    return f"(expected one of {', '.join([*near, *(n for n in names if n not in near)])})"
