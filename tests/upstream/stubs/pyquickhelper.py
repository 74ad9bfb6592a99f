"""Stands in for pyquickhelper: the test case, temporary folders and profiles."""

from __future__ import annotations

import cProfile
import functools
import io
import logging
import pstats
import shutil
import unittest
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class ExtTestCase(unittest.TestCase):
    """``unittest.TestCase`` and the assertions that these tests use besides."""

    def assertRaise(self, function: Callable[[], Any], error: Any, message: str = "") -> None:
        with self.assertRaises(error) as caught:
            function()
        self.assertIn(message, str(caught.exception))

    def assertGreater(self, a: Any, b: Any, msg: Any = None) -> None:
        """Allow equality, as pyquickhelper documents it."""
        self.assertGreaterEqual(a, b, msg)

    def assertStartsWith(self, prefix: str, text: str, msg: Any = None) -> None:
        self.assertEqual(prefix, text[: len(prefix)], msg)

    def assertEmpty(self, value: Any) -> None:
        self.assertTrue(value is None or len(value) == 0)

    def assertNotEmpty(self, value: Any) -> None:
        self.assertTrue(value is not None and len(value) > 0)

    def assertExists(self, path: str) -> None:
        self.assertTrue(Path(path).exists(), path)

    def assertEqualArray(
        self, first: Any, second: Any, msg: Any = None, decimal: int | None = None
    ) -> None:
        del msg
        if decimal is None:
            np.testing.assert_array_equal(first, second)
        else:
            np.testing.assert_array_almost_equal(first, second, decimal=decimal)

    def assertLogging(
        self, function: Callable[[], Any], logger_name: str, level: Any = logging.DEBUG, **_: Any
    ) -> tuple[Any, str]:
        stream, logger = io.StringIO(), logging.getLogger(logger_name)
        handler, before = logging.StreamHandler(stream), logger.level
        logger.addHandler(handler)
        logger.setLevel(level)
        try:
            result = function()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
        return result, stream.getvalue()


def ignore_warnings(kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that ignores warnings of some classes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():
                for kind in kinds if isinstance(kinds, Sequence) else [kinds]:
                    warnings.simplefilter("ignore", kind)
                return function(*args, **kwargs)

        return run

    return decorate


def skipif_appveyor(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that changes nothing: this is not that service."""
    del reason
    return lambda function: function


def get_temp_folder(file: str, name: str, clean: bool = True, **_: Any) -> str:
    """Return a folder of this name in the working directory."""
    del file
    folder = Path.cwd() / name
    if clean and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    return str(folder)


def profile(function: Callable[[], Any], **_: Any) -> tuple[pstats.Stats, str]:
    """Return the profile of a call, and its text."""
    profiler, stream = cProfile.Profile(), io.StringIO()
    profiler.runcall(function)
    stats = pstats.Stats(profiler, stream=stream)
    stats.sort_stats("cumulative").print_stats(10)
    return stats, stream.getvalue()


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def to_text(self) -> str:
        return self.text


def profile2graph(stats: pstats.Stats, **_: Any) -> tuple[_Text, dict[str, Any]]:
    """Return the profile as an object with a text."""
    return _Text(f"{stats.total_tt:.3f} s"), {}  # type: ignore[attr-defined]
