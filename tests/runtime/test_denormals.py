"""Denormal numbers are zero inside a run, and keep their value outside of it."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.runtime import session as denormals
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.session import FlushDenormals

TINY = np.full(64, 1e-40, np.float32)


def _doubling() -> bytes:
    x = ir.val("x", ir.DataType.FLOAT, ["n"])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g")
    graph.outputs.append(OpBuilder(graph).Mul(x, 2.0))
    return finalize(ir.Model(graph, ir_version=10)).SerializeToString()


def test_every_session_flushes_and_the_caller_does_not() -> None:
    sessions = [runtime.create(_doubling(), threads=1) for _ in range(3)]
    for session in sessions:
        assert not runtime.run(session, None, {"x": TINY})[0].any()
        assert (TINY * np.float32(2)).all()


def test_another_thread_flushes_too() -> None:
    session = runtime.create(_doubling(), threads=1)
    nonzero: list[bool] = []

    def work() -> None:
        nonzero.append(bool(runtime.run(session, None, {"x": TINY})[0].any()))
        nonzero.append(bool((TINY * np.float32(2)).all()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert nonzero == [False, True]


def test_the_mode_ends_with_its_context() -> None:
    with FlushDenormals():
        inside = TINY * np.float32(2)
    assert not inside.any()
    assert (TINY * np.float32(2)).all()


_INVALID = 1  # FE_INVALID, which nothing else in this test raises


def _set_a_flag() -> None:
    """Raise a sticky floating-point flag, which is not part of the mode."""
    assert denormals._LIBRARY.feraiseexcept(_INVALID) == 0


def test_sticky_flags_are_not_part_of_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    known = denormals._known_mode()
    if known is None:
        pytest.skip("the place of the mode is not known on this platform")
    for start in (known, None):
        monkeypatch.setattr(denormals, "_flush_mode", start)
        denormals._LIBRARY.feclearexcept(_INVALID)
        with denormals.learn_denormal_mode():
            _set_a_flag()
        assert denormals._flush_mode is start


def test_an_unknown_mode_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = denormals._known_mode()
    if known is None:
        pytest.skip("the place of the mode is not known on this platform")
    monkeypatch.setattr(denormals, "_flush_mode", None)
    with denormals.learn_denormal_mode():  # as the first session does
        denormals._LIBRARY.fesetenv(known)
    learnt = denormals._flush_mode
    assert learnt is not None
    assert (TINY * np.float32(2)).all(), "the caller's mode is back"
    with FlushDenormals():
        inside = TINY * np.float32(2)
    assert not inside.any()
    with denormals.learn_denormal_mode():
        _set_a_flag()
        denormals._LIBRARY.fesetenv(known)
    assert denormals._flush_mode is learnt


def test_no_process_is_started_at_import() -> None:
    """Finding the math library by name would start ldconfig, or a compiler."""
    watch = "sys.addaudithook(lambda event, _: starts.append(event) if event in EVENTS else None)"
    lines = [
        "import sys",
        "EVENTS = {'subprocess.Popen', 'os.system', 'os.exec', 'os.fork', 'os.posix_spawn'}",
        "starts = []",
        watch,
        "import onnxtrain, onnxtrain.runtime.session as d",
        "assert not starts, starts",
        "assert sys.platform != 'linux' or d._LIBRARY is not None",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
