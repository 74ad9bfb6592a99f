"""onnxruntime 1.19.2: its tests of ``ORTModule``, on the CPU."""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import math
import random
import re
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.upstream.process import run_tests
from tests.upstream.results import Result, merged

NAME = "onnxruntime"
FOLDER = Path("orttraining/orttraining/test/python")
API, OPS = "orttraining_test_ortmodule_api.py", "orttraining_test_ortmodule_onnx_ops.py"
HELPERS = ("_test_helpers.py", "_test_commons.py", "_orttraining_ortmodule_models.py")
PARAMETER_SETS = 36
"""Of each test that run; two tests, of transposes, have 186 and 792."""
MOST_ELEMENTS = 2**22
"""Of a tensor; one test transposes 2**28."""
LONGEST = 900
"""Seconds of one test."""
HOW = "tests of ORTModule, on `install()`, CPU for CUDA"
INTERNALS = "reads private internals of ORTModule"
LOGS = "asserts the text of log messages"
NEEDS_CUDA = "needs a CUDA device: moves modules or data between two devices"
NEEDS_BERT = "loads the pretrained bert-base-uncased"
CAUSES = {
    r"_torch_module|_runtime_options|ortmodule\._\w+'|_are_deterministic|_defined_from": INTERNALS,
    r"_ORTModuleFunctionBackward": INTERNALS,
    r"_FALLBACK_POLICY": "falls back to torch by a policy; here by `ORTModule(fallback=True)`",
    r"ONNX_OPSET_VERSION": "asserts the opset of exports; here it is that of torch",
    r"huggingface\.co|transformers is not installed": NEEDS_BERT,
}
"""Causes by a pattern of the reason, for failures whose cause is not in this project."""
CAUSES_OF = {
    "test_model_without_device": NEEDS_CUDA,
    "test_forward_data_and_model_on_different_devices": NEEDS_CUDA,
    "test_model_with_multiple_devices": NEEDS_CUDA,
    "test_cache_exported_model": "`ORTMODULE_CACHE_DIR`: here each process exports the module",
    "test_ortmodule_attribute_name_collision_warning": INTERNALS,
    "test_ortmodule_gradient_builder": INTERNALS,
    "test_opset_version_change": INTERNALS,
    "test_ortmodule_setattr_ortmodule_attribute": INTERNALS,
    "test_runtime_inspector_label_and_embed_sparsity_detection": LOGS,
    "test_ortmodule_string_inputs_are_ignored": LOGS,
    "test_enable_layerwise_recompute": LOGS,
    "test_ops_for_padding_elimination": INTERNALS,
    "test_e2e_padding_elimination": "12 layers and 10 steps of Adam, which enlarges rounding: "
    "differs by 1.6e-3, the tolerance is 1e-3; then reads private internals",
    "test_gradient_correctness_chunk": "asserts nodes of torch's export; the values agree",
    "test_aten_multinomial": "expects the values that torch's generator draws",
    "test_gradient_correctness_minmax[data_type1": "float16: torch sends the gradient to the first "
    "of equal values, here they share it, as with `torch.amax`",
    "test_gradient_correctness_minmax[data_type2": "onnxruntime has no ReduceMax of bfloat16 on a "
    "CPU",
    "test_overridden_softmax_export": "rounding of the 16 bit types: a unit in the last place is "
    "5e-4, the tolerance is 1e-5; then reads private internals",
    "test_conv_transpose_gradient_with_groups": "rounding: sums of 2,000 products differ by 6e-5, "
    "the tolerance is 1e-8",
    "test_gradient_correctness_argmax_unfold": "rounding: torch itself differs by 1e-4 from "
    "float64, the tolerance",
    "test_ortmodule_list_dict_input_with_kwargs_and_registered_buffer": "rounding: sums of 784 "
    "products differ by 1.3e-5, the tolerance is 1e-5",
    "test_gradient_correctness_pool2d[MaxPool": "rounding: the two largest values of a window "
    "differ by 1e-7, and the other one is the maximum",
}
"""Causes by the start of the name of a test."""


def run(checkout: Path) -> list[Result]:
    """Run both files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (API, OPS, *HELPERS):
            text = (checkout / FOLDER / file).read_text()
            (folder / file).write_text(_on_cpu(text) if file == API else text)
        results = run_tests(
            NAME,
            [folder / API, folder / OPS],
            how=HOW,
            setup=f"{__name__}:prepare",
            options=["-p", __name__],
            environment={"PYTHONPATH": name},
            timeout=4 * 3600,
        )
    return merged(caused(r) for r in results)


def _on_cpu(text: str) -> str:
    text = re.sub(r"(['\"])cuda(:\d+)?\1", '"cpu"', text)
    text = text.replace("for _step in range(1000)", "for _step in range(50)")  # of 12 GFLOP
    return text.replace(".cuda()", ".cpu()").replace("torch.cuda.synchronize()", "None")


def caused(result: Result) -> Result:
    """Return a failure with its cause, if that is known and not in this project."""
    if result.outcome != "fail":
        return result
    name = result.program.rpartition("::")[2]
    causes = [c for start, c in CAUSES_OF.items() if name.startswith(start)]
    causes += [c for pattern, c in CAUSES.items() if re.search(pattern, result.reason)]
    cause = next(iter(causes), None)
    if cause is None:
        return result
    return dataclasses.replace(result, reason=cause, outside=True)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Keep some parameter sets of each test, evenly spaced, without the largest tensors."""
    by_test: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in items:
        if _elements(item) <= MOST_ELEMENTS:
            by_test[item.originalname].append(item)
    items[:] = [
        some[len(some) * n // min(len(some), PARAMETER_SETS)]
        for some in by_test.values()
        for n in range(min(len(some), PARAMETER_SETS))
    ]


def _elements(item: pytest.Function) -> int:
    """Return the elements of the largest tensor whose shape is a parameter of the test."""
    values: Any = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return max((math.prod(v) for v in values if _is_shape(v)), default=0)


def _is_shape(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(n, int) for n in value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Start a test at seed 0, and end it if it runs for too long."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    pytest.fail(f"still runs after {LONGEST} s", pytrace=False)  # not an Exception: exporters go on


class _Policy(enum.IntFlag):
    FALLBACK_DISABLE = 1
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16


class _SkipCheck(enum.IntFlag):
    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8


def prepare() -> None:
    """Install our API, and empty stand-ins for the private modules that the files import."""
    import onnxtrain.compat.ort

    onnxtrain.compat.ort.install()
    ortmodule = onnxtrain.compat.ort.ortmodule
    errors = ("FallbackException", "IOError", "DeviceException", "ONNXModelException")
    parts = {
        "_fallback": {f"ORTModule{e}": type(f"ORTModule{e}", (Exception,), {}) for e in errors}
        | {"_FallbackPolicy": _Policy},
        "_utils": {},
        "_custom_gradient_registry": {"register_gradient": lambda *_: lambda function: function},
        "_graph_execution_manager_factory": {"GraphExecutionManagerFactory": None},
    }
    for name, content in parts.items():
        module = types.ModuleType(f"onnxruntime.training.ortmodule.{name}")
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
        setattr(ortmodule, name, module)
    ortmodule._SkipCheck = _SkipCheck
    _transformers()


def _transformers() -> None:
    """Stand in for ``AdamW``, which transformers 5 dropped, and for transformers if absent."""
    modules: dict[str, types.ModuleType] = {}
    for name in ("transformers", "transformers.modeling_outputs"):
        try:
            modules[name] = importlib.import_module(name)
        except ImportError:
            modules[name] = types.ModuleType(name)
    package, outputs = modules.values()
    for name in ("AutoConfig", "BertForSequenceClassification", "Trainer"):
        package.__dict__.setdefault(name, _Absent())
    outputs.__dict__.setdefault("SequenceClassifierOutput", dict)
    package.__dict__["AdamW"] = AdamW
    sys.modules |= modules


class AdamW(torch.optim.Optimizer):
    """AdamW as in transformers 4: the bias is corrected in the learning rate."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["step"] = state.get("step", 0) + 1
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
                state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * p.grad**2
                rate = group["lr"] * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
                p -= rate * state["m"] / (state["v"].sqrt() + 1e-6)


class _Absent:
    def __getattr__(self, name: str) -> object:
        raise ImportError("transformers is not installed")
