"""onnxcustom: its tests of training and its gallery, by changed imports and on its own library."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.upstream import stubs
from tests.upstream.process import run_script, run_tests
from tests.upstream.results import Result, explain

NAME = "onnxcustom"
TESTS = ("_unittests/ut_training/test_*.py",)
TESTS_OF_HELPERS = ("test_onnx_helper.py", "test_orttraining_helper.py")
IMPORTS, LIBRARY = "imports changed", "its own library on `install()`"
VALUES = Path(__file__).with_name("onnxcustom_values.py")
CAUSES_WITH_IMPORTS: Mapping[str, str] = {}
_NUMPY = "NumPy 2.4: onnxcustom calls float() on a loss of shape [1, 1] to report it"
CAUSES_WITH_LIBRARY: Mapping[str, str] = {
    "test_grad_helper.py::*::test_grad_helper_loss": "the test names the loss of a model that has "
    "none; onnxruntime-training wrote a graph with an input that nothing computes",
    "test_optimizers.py::*::test_ort_gradient_optimizers_use_numpy_nan*": _NUMPY,
    "test_optimizers_forward_backward.py::*::test_ort_gradient_optimizers_exc*": _NUMPY,
    "test_optimizers_forward_backward.py::*::test_ort_gradient_optimizers_log": _NUMPY,
    "test_optimizers_forward_backward.py::*::test_ort_gradient_optimizers_log_w": _NUMPY,
}


def run(checkout: Path) -> list[Result]:
    """Run tests and gallery, both ways, and compare the values of the two."""
    tests = sorted(path for pattern in TESTS for path in checkout.glob(pattern))
    tests += [checkout / "_unittests/ut_utils" / name for name in TESTS_OF_HELPERS]
    gallery = sorted(checkout.glob("_doc/examples/plot_orttraining_*.py"))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        changed = [_with_changed_imports(path, Path(folder)) for path in [*tests, *gallery]]
        at = len(tests)
        ways = (
            (IMPORTS, changed[:at], changed[at:], "imports_changed", CAUSES_WITH_IMPORTS, {}),
            (
                LIBRARY,
                tests,
                gallery,
                "own_library",
                CAUSES_WITH_LIBRARY,
                {"PYTHONPATH": str(checkout)},
            ),
        )
        for way, files, scripts, setup, causes, environment in ways:
            options: Any = {"setup": f"{__name__}:{setup}", "environment": environment}
            some = run_tests(NAME, files, how=f"tests, {way}", **options)
            some += [run_script(NAME, p, how=f"gallery, {way}", **options) for p in scripts]
            results += explain(some, causes)
    library = {"PYTHONPATH": str(checkout)}
    setup = f"{__name__}:own_library"
    how = "values, both ways"
    return [*results, run_script(NAME, VALUES, how=how, setup=setup, environment=library)]


def _with_changed_imports(path: Path, folder: Path) -> Path:
    """Copy a file; its imports of the library, but for drawings, are ours in the copy."""
    text = re.sub(
        r"\bonnxcustom(?!\.plotting)(?=(\.[\w.]+)? import)",
        "onnxtrain.compat.onnxcustom",
        path.read_text(),
    )
    copied = folder / path.name
    copied.write_text(text)
    return copied


def imports_changed() -> None:
    """Prepare the process of a file with changed imports."""
    _older_packages()
    stubs.install("onnxcustom")


def own_library() -> None:
    """Prepare the process of an unchanged file on the unchanged library."""
    _older_packages()
    _estimators_with_tags()


def _older_packages() -> None:
    """Install our API, and supply what these files use and newer releases do not have."""
    import onnxtrain.compat.ort

    onnxtrain.compat.ort.install()
    stubs.install("mlprodict", "pyquickhelper")
    _onnx_mapping()
    _renamed_loss()
    _older_metrics()


def _onnx_mapping() -> None:
    """Supply ``onnx.mapping``, which onnx 1.18 dropped."""
    mapping = types.ModuleType("onnx.mapping")
    kinds = [kind for kind in ir.DataType if kind not in (ir.DataType.UNDEFINED,)]
    mapping.TENSOR_TYPE_TO_NP_TYPE = {  # type: ignore[attr-defined]
        int(kind): np.dtype(kind.numpy()) for kind in kinds
    }
    sys.modules["onnx.mapping"] = mapping


def _renamed_loss() -> None:
    """Accept ``loss="log"``, which scikit-learn 1.3 renamed to ``"log_loss"``."""
    from sklearn.linear_model import SGDClassifier

    original: Callable[..., None] = SGDClassifier.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("loss") == "log":
            kwargs["loss"] = "log_loss"
        original(self, *args, **kwargs)

    SGDClassifier.__init__ = init  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", category=FutureWarning)


def _older_metrics() -> None:
    """Accept ``log_loss(eps=)`` and the arguments of ``MLP._backprop`` of scikit-learn 1.4."""
    import sklearn.metrics
    from sklearn.neural_network._multilayer_perceptron import BaseMultilayerPerceptron

    log_loss: Callable[..., float] = sklearn.metrics.log_loss
    backprop: Callable[..., Any] = BaseMultilayerPerceptron._backprop

    def clipped(y_true: Any, y_pred: np.ndarray, *, eps: float = 1e-15, **kwargs: Any) -> float:
        # Below 0, ``eps`` did nothing.
        return log_loss(y_true, np.clip(y_pred, eps, 1 - eps) if eps > 0 else y_pred, **kwargs)

    def without_weights(self: Any, X: Any, y: Any, *arguments: Any) -> Any:
        weights = () if len(arguments) == 5 else (None,)
        return backprop(self, X, y, *weights, *arguments)

    sklearn.metrics.log_loss = clipped
    setattr(BaseMultilayerPerceptron, "_backprop", without_weights)  # noqa: B010


def _estimators_with_tags() -> None:
    """Add the method that scikit-learn 1.7 asks of estimators with a base class of their own."""
    from sklearn.base import BaseEstimator

    module: Any = importlib.import_module("onnxcustom.training._base_estimator")
    module.BaseEstimator.__sklearn_tags__ = lambda self: BaseEstimator().__sklearn_tags__()
