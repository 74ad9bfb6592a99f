"""Devices: which execution provider of onnxruntime runs a model, and where its tensors live.

:data:`DEVICES` is the only table of devices. ``Trainer(device=...)``, the command line, the
scikit-learn estimators and the page "Devices" read it; one more entry is one more device.

A provider comes with a wheel of onnxruntime (``onnxruntime-openvino``), or as a plugin: a shared
library in a wheel of its own (``onnxruntime-ep-webgpu``) that any onnxruntime since 1.23 loads. A
plugin is registered when its device is used for the first time.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from onnxtrain.errors import MissingExtraError, OnnxTrainError, by_caller, expected_one_of

CPU = "CPUExecutionProvider"


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, and what onnxruntime needs to run models on it.

    Attributes:
        name: the name in ``Trainer(device=...)``.
        provider: onnxruntime's name of the execution provider.
        target: what ``build(target=...)`` takes for it.
        wheel: the package on PyPI that has the provider.
        replaces: whether the wheel contains onnxruntime, which must not be installed beside it.
        plugin: ``module:function`` of an installed wheel that returns the path of the plugin;
            empty if the provider is a part of onnxruntime.
        library: path of the plugin, given by :func:`register_device`.
        behind: providers to try in front of the CPU's for nodes that this one leaves.
        options: default options of the provider.
        index_option: name of the option that selects one of several devices; empty if there is
            none, and ``name:1`` is refused.
        capture_option: name of the option that captures runs as a graph; empty if there is none.
        thread_option: name of the option for the number of CPU threads; empty if there is none.
        on_host: whether parameters and state live in memory of the CPU. If the provider has memory
            of its own, onnxruntime copies what a run reads and writes.
        systems: operating systems that have the wheel; empty for all.
        tested: how and where we tested it; empty if nobody here could run it.
        target_source: where the facts about the target come from: ``"probed"`` on the device, or
            ``"derived"`` from documentation.
        index: which of several devices.
        allow_cpu_fallback: whether most nodes may run on the CPU.
    """

    name: str
    provider: str
    target: str = "portable"
    wheel: str = ""
    replaces: bool = False
    plugin: str = ""
    library: str = ""
    behind: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    index_option: str = ""
    capture_option: str = ""
    thread_option: str = ""
    on_host: bool = True
    systems: tuple[str, ...] = ()
    tested: str = ""
    target_source: str = "derived"
    index: int | None = None
    allow_cpu_fallback: bool = False

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.index}"

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU provider of onnxruntime runs the models."""
        return self.provider == CPU

    @property
    def install(self) -> str:
        """The command that installs the provider; empty if it is unknown."""
        if not self.wheel:
            return ""
        return f"pip install {self.wheel}" + (", in place of onnxruntime" if self.replaces else "")

    @property
    def memory(self) -> tuple[str, int]:
        """Where parameters and state live: onnxruntime's name of the memory, and an index."""
        return ("cpu", 0) if self.on_host else (self.name, self.index or 0)

    def settings(self, *, capture: bool = False, threads: int | None = None) -> dict[str, str]:
        """Return the options of the provider for one session."""
        settings = dict(self.options)
        if self.thread_option and threads is not None:
            settings.setdefault(self.thread_option, str(threads))
        if self.index_option:
            settings[self.index_option] = str(self.index or 0)
        if self.capture_option:
            settings[self.capture_option] = str(int(capture))
        return settings


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device(
            "cpu",
            CPU,
            target="cpu",
            wheel="onnxruntime",
            tested="every test, Linux x86-64 and arm64",
            target_source="probed",
        ),
        Device(
            "cuda",
            "CUDAExecutionProvider",
            target="cuda",
            wheel="onnxruntime-gpu",
            replaces=True,
            # The default strategy rounds up to powers of two: a third more memory, not faster.
            options=(("arena_extend_strategy", "kSameAsRequested"),),
            index_option="device_id",
            capture_option="enable_cuda_graph",
            on_host=False,
            systems=("Linux", "Windows"),
            tested="H200, by hand before releases",
            target_source="probed",
        ),
        Device(
            "openvino",
            "OpenVINOExecutionProvider",
            target="openvino",
            wheel="onnxruntime-openvino",
            replaces=True,
            plugin="onnxruntime_ep_openvino:get_library_path",
            # Keep the precision of the model: OpenVINO computes in 16 bits where that is faster.
            options=(("precision", "ACCURACY"),),
            thread_option="num_of_threads",
            systems=("Linux", "Windows"),
            tested="x86-64 CPU, in CI",
            target_source="probed",
        ),
        Device(
            "webgpu",
            "WebGpuExecutionProvider",
            target="webgpu",
            wheel="onnxruntime-ep-webgpu",
            plugin="onnxruntime_ep_webgpu:get_library_path",
        ),
        Device(
            "directml",
            "DmlExecutionProvider",
            wheel="onnxruntime-directml",
            replaces=True,
            index_option="device_id",
            systems=("Windows",),
        ),
        Device(
            "coreml",
            "CoreMLExecutionProvider",
            wheel="onnxruntime",
            options=(("ModelFormat", "MLProgram"),),
            systems=("Darwin",),
        ),
        Device(
            "mlx",
            "MLXExecutionProvider",
            wheel="onnxruntime-ep-mlx",
            plugin="onnxruntime_ep_mlx:library_path",
            systems=("Darwin",),
        ),
        Device(
            "migraphx",
            "MIGraphXExecutionProvider",
            wheel="onnxruntime-migraphx",
            replaces=True,
            index_option="device_id",
            systems=("Linux",),
        ),
        Device(
            "rocm",
            "ROCMExecutionProvider",
            wheel="onnxruntime-rocm",
            replaces=True,
            index_option="device_id",
            systems=("Linux",),
        ),
        Device(
            "qnn",
            "QNNExecutionProvider",
            wheel="onnxruntime-qnn",
            plugin="onnxruntime_qnn:get_library_path",
        ),
        Device(
            "tensorrt",
            "TensorrtExecutionProvider",
            target="cuda",
            wheel="onnxruntime-gpu",
            replaces=True,
            behind=("CUDAExecutionProvider",),
            index_option="device_id",
            systems=("Linux", "Windows"),
        ),
    )
}
"""All devices by name."""


def import_onnxruntime() -> ModuleType:
    """Return the onnxruntime module.

    Raises:
        MissingExtraError: with the command that installs it.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            'onnxruntime is not installed\nhint: pip install "onnxtrain[cpu]" (or [gpu])'
        ) from error
    return onnxruntime


def runtime_version() -> str:
    """Return the version of onnxruntime."""
    return import_onnxruntime().__version__


def find(
    device: str | Device,
    provider_options: Mapping[str, Any] | None = None,
    *,
    allow_cpu_fallback: bool = False,
) -> Device:
    """Return a device by name; nothing is imported or loaded.

    Args:
        device: a name of :data:`DEVICES`, with ``:1`` for the second device of a kind, or the name
            of an execution provider. A :class:`Device` is returned with the options added.
        provider_options: options of the execution provider, besides the defaults.
        allow_cpu_fallback: whether most nodes may run on the CPU.

    Raises:
        OnnxTrainError: if the name is unknown.
    """
    found = device if isinstance(device, Device) else _find(device)
    if provider_options:
        given = {name: str(value) for name, value in provider_options.items()}
        found = dataclasses.replace(found, options=(*(dict(found.options) | given).items(),))
    if allow_cpu_fallback:
        found = dataclasses.replace(found, allow_cpu_fallback=True)
    return found


def _find(text: str) -> Device:
    name, colon, index = text.partition(":")
    by_provider = {d.provider: d for d in DEVICES.values()}
    device = DEVICES.get(name) or by_provider.get(name)
    if device is None and re.fullmatch(r"\w+ExecutionProvider", name):
        device = Device(name, name)
    if device is None or (colon and not index.isdecimal()):
        known = [*DEVICES, "cuda:1"]
        raise OnnxTrainError(
            f"unknown device: {text!r} {expected_one_of(text, known)}\nhint: "
            + by_caller(
                "onnxtrain.register_device(name, library) adds a plugin of onnxruntime",
                "onnxtrain devices lists what this machine has",
            )
        )
    if not colon:
        return device
    if not device.index_option and not device.plugin and not device.library:
        raise OnnxTrainError(
            f"{name} has one device, got {text!r}\nhint: "
            + by_caller(
                f"Trainer(..., device={name!r}, provider_options=...) selects others",
                f"--device {name}",
            )
        )
    return dataclasses.replace(device, index=int(index))


def register_device(
    name: str, library: str | os.PathLike[str], *, target: str = "portable"
) -> Device:
    """Add a device that a plugin of onnxruntime provides, and return its entry.

    Args:
        name: the name for ``Trainer(device=...)``. A known name keeps its entry, and its plugin is
            loaded from ``library``.
        library: path of the plugin, a shared library.
        target: what to build models for, if the name is new.

    Raises:
        OnnxTrainError: if onnxruntime cannot load the library, or it finds no device.

    Example::

        onnxtrain.register_device("npu", "/opt/vendor/libonnxruntime_npu.so")
        trainer = onnxtrain.Trainer("art", device="npu")
    """
    path = os.path.abspath(os.fsdecode(library))
    ort = import_onnxruntime()
    before = {d.ep_name for d in _ep_devices(ort)}
    _register(ort, name, path)
    found = sorted({d.ep_name for d in _ep_devices(ort)} - before)
    known = DEVICES.get(name)
    if known is None and not found:
        raise OnnxTrainError(
            f"{path}: the plugin finds no device on this machine\n"
            "hint: its documentation says which hardware and drivers it needs"
        )
    entry = known or Device(name, found[0], target=target)
    DEVICES[name] = dataclasses.replace(entry, library=path)
    return DEVICES[name]


_registered: set[str] = set()


def _register(ort: ModuleType, name: str, path: str) -> None:
    """Load a plugin, once per process."""
    if path in _registered:
        return
    try:
        ort.register_execution_provider_library(name, path)
    except AttributeError as error:
        raise OnnxTrainError(
            f"onnxruntime {ort.__version__} has no plugins\nhint: pip install 'onnxruntime>=1.23'"
        ) from error
    except Exception as error:  # onnxruntime's errors share no base class
        raise OnnxTrainError(
            f"{path}: onnxruntime cannot load this plugin: {first_line(error)}\n"
            f"hint: this is onnxruntime {ort.__version__}; the plugin may need another one, or "
            "libraries of its driver"
        ) from error
    _registered.add(path)


def _ep_devices(ort: ModuleType) -> list[Any]:
    return list(ort.get_ep_devices()) if hasattr(ort, "get_ep_devices") else []


def plugin_devices(device: Device) -> list[Any]:
    """Return what a plugin found on this machine, after registering it; empty without a plugin."""
    ort = import_onnxruntime()
    path = device.library or _installed_library(device.plugin)
    if path is None:
        return []
    _register(ort, device.name, path)
    return [d for d in _ep_devices(ort) if d.ep_name == device.provider]


def _installed_library(plugin: str) -> str | None:
    """Return the path of the plugin in an installed wheel, or ``None``."""
    module, _, function = plugin.partition(":")
    try:
        return str(getattr(importlib.import_module(module), function)()) if module else None
    except ModuleNotFoundError:
        return None
    except Exception as error:  # the code of the wheel may raise anything
        raise OnnxTrainError(
            f"the plugin of {module!r} is damaged: {first_line(error)}\n"
            f"hint: pip install --force-reinstall {module.replace('_', '-')}"
        ) from error


def check(device: str | Device) -> Device:
    """Return a device that this installation of onnxruntime can try to start.

    Raises:
        OnnxTrainError: if the name is unknown, or a plugin finds no device.
        MissingExtraError: if a wheel is missing, with the command that installs it.
    """
    device = find(device)
    if device.is_cpu:
        return device
    ort = import_onnxruntime()
    found = plugin_devices(device)
    if found and (device.index or 0) < len(found):
        return device
    if found:
        raise OnnxTrainError(
            f"{device}: this machine has {len(found)} of them, counted from 0\n"
            f"hint: device={device.name!r} is the first one"
        )
    available = ort.get_available_providers()
    if device.provider in available:
        return device
    if device.library or _installed_library(device.plugin):
        raise OnnxTrainError(
            f"{device.name}: the plugin is installed and finds no device on this machine\n"
            "hint: its documentation says which hardware and drivers it needs"
        )
    system = platform.system()
    head = (
        f"{device.name}: onnxruntime {ort.__version__} has no {device.provider}, only "
        f"{', '.join(available)}"
    )
    if device.systems and system not in device.systems:
        raise MissingExtraError(
            f"{head}\nhint: {device.wheel} is for {' and '.join(device.systems)}, this is {system}"
        )
    hint = device.install or (
        "install the onnxruntime of its vendor, or call onnxtrain.register_device(name, library)"
    )
    raise MissingExtraError(f"{head}\nhint: {hint}")


def open_session(
    source: bytes | str,
    options: Any,
    device: Device,
    *,
    capture: bool = False,
    threads: int | None = None,
) -> Any:
    """Return a session on a device; any exception of onnxruntime passes through.

    onnxruntime would otherwise print a warning and fall back to the CPU.
    """
    ort = import_onnxruntime()
    settings = device.settings(capture=capture, threads=threads)
    if device.is_cpu:
        return ort.InferenceSession(source, options, providers=[CPU])
    # Plugins first: onnxruntime lists a registered one as available, but leaves it out by name.
    found = plugin_devices(check(device))
    if found:
        options.add_provider_for_devices([found[device.index or 0]], settings)
        return ort.InferenceSession(source, options, enable_fallback=0)
    providers = [(device.provider, settings), *device.behind, CPU]
    return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_lines(error: BaseException) -> str:
    """Return the end of an error's message, which is where compilers of devices say what is wrong.

    Before it stand the functions through which the error came.
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[-3:])[-_LONGEST_ERROR:] if lines else type(error).__name__


_LONGEST_ERROR = 500
