"""Exceptions of this library, and the wording of hints.

A message states what is wrong (the user's names in quotes), where (node, dtype, shape), and how to
fix it on a line that starts with ``hint:``. Hints use the arguments of the call that the user made:
``freeze`` in ``build``, otherwise ``wrt``.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Generator, Iterable


class OnnxTrainError(Exception):
    """Base of all errors of this library."""


class LoadError(OnnxTrainError, ValueError):
    """The file is not a model we are willing to open: broken, hostile or over a limit."""


class SaveError(OnnxTrainError, ValueError):
    """The model is not complete enough to write, or the file system refuses."""


class PrepareError(OnnxTrainError, ValueError):
    """The model cannot be brought to the normal form, or a name in the request does not exist."""


class ShapeError(OnnxTrainError, ValueError):
    """A rank or dimension that a step needs is unknown or does not fit."""


class LabelError(ShapeError):
    """A label is not among the classes of the model."""


class UndifferentiableError(OnnxTrainError, NotImplementedError):
    """A gradient was asked for that does not exist or that we do not know how to do right."""


class LoweringError(OnnxTrainError):
    """The model cannot be expressed in the operators of the target."""


class ProfileError(LoweringError):
    """There is no such runtime profile, or its file does not say what one has to."""


class ProbeError(LoweringError):
    """A pack of probe models or its results cannot be read, or a runtime cannot be probed."""


class VerificationError(LoweringError):
    """A lowered model does not do what the original does; nothing was written."""


class DefectError(OnnxTrainError):
    """A model that was built here is refused by the runtime: a defect of this library."""


class CheckpointError(OnnxTrainError, ValueError):
    """A checkpoint, manifest or artifact is broken or does not fit the model."""


class NonFiniteError(OnnxTrainError, ArithmeticError):
    """Training has met an infinity or a NaN."""


class UncopiableError(OnnxTrainError, TypeError):
    """Something that holds sessions or memory of its own was to be pickled or copied."""


class BusyError(OnnxTrainError, RuntimeError):
    """A trainer is in use by another thread, or a directory by another run."""


class CompatError(OnnxTrainError):
    """A call of an older API that has no counterpart on a stock runtime."""


class MissingExtraError(OnnxTrainError, ImportError):
    """An optional dependency is not installed."""


_FREEZES: contextvars.ContextVar[bool] = contextvars.ContextVar("freezes", default=False)


@contextlib.contextmanager
def hints_name_freeze() -> Generator[None]:
    """Let hints speak of ``freeze`` while a call runs that has this option, and no ``wrt``."""
    token = _FREEZES.set(True)
    try:
        yield
    finally:
        _FREEZES.reset(token)


def exclusion_hint(what: str) -> str:
    """Return how the user leaves something out of what is differentiated."""
    return f"name {what} in `freeze`" if _FREEZES.get() else f"leave {what} out of `wrt`"


def expected_one_of(name: str, known: Iterable[str]) -> str:
    """Return ``(expected one of ...)`` for an unknown name: the known ones, nearest first."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=len(names), cutoff=0.4)
    return f"(expected one of {', '.join([*near, *(n for n in names if n not in near)])})"
