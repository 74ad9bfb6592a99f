"""A torch module whose forward and backward passes run on ONNX Runtime."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onnxtrain.errors import OnnxTrainError
from onnxtrain.torch.autograd_function import Run, run_forward
from onnxtrain.torch.compiled_call import CompiledCall, FlatArguments, compile_call, state_of

_OWN = "module."


class TrainableModule(nn.Module):
    """Runs a module's forward and backward passes as two ONNX sessions.

    It is a module like any other: its parameters are the wrapped module's, by the same names, so
    every torch optimizer, gradient accumulation, hooks and ``DistributedDataParallel`` work. The
    module is exported again when the mode of a part, what needs a gradient, or rank or dtype of an
    input change; a change of batch size costs nothing, one of another size an export. Buffers such
    as running statistics are updated as torch does; dropout masks are drawn anew for each call from
    torch's generator. Under autocast it computes in the precision of its parameters.

    Args:
        module: what to run.
        fallback: run the module in torch, with a warning, where it cannot be exported or
            differentiated.
        threads: of onnxruntime's pool; ``None`` takes all cores.
    """

    def __init__(
        self, module: nn.Module, *, fallback: bool = False, threads: int | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.fallback = fallback
        self.threads = threads
        self.training = module.training
        self._plans: dict[Any, list[CompiledCall] | None] = {}
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped module gives."""
        call = FlatArguments.of(args, kwargs)
        call = _in_full_precision(self.module, call)
        need = torch.is_grad_enabled()
        modes, known = state_of(self.module)
        wanted = tuple(p.requires_grad for p in known) if need else None
        compiled = self._plan(call, tuple(modes), wanted)
        if compiled is None:
            return self.module(*args, **kwargs)
        parameters = [known[i] for i in compiled.order]
        if compiled.backward is None:
            feeds = dict(
                zip([*compiled.inputs, *compiled.stored], [*call.tensors, *parameters], strict=True)
            )
            made = run_forward(compiled, self.module, feeds)
            return compiled.result([made[n] for n in compiled.outputs])
        return compiled.result(Run.apply(compiled, self.module, *call.tensors, *parameters))

    def _plan(
        self, call: FlatArguments, modes: tuple[bool, ...], wanted: tuple[bool, ...] | None
    ) -> CompiledCall | None:
        """Return the compiled call, from those that there are; ``None`` stands for torch."""
        key = (modes, wanted, call.kind)
        compiled_calls = self._plans.setdefault(key, [])
        if compiled_calls is None:
            return None
        for compiled in compiled_calls:
            if compiled.fits(call.tensors):
                return compiled
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                compiled = compile_call(
                    self.module, call, wanted is not None, self.threads, compiled_calls
                )
        except OnnxTrainError as error:
            if not self.fallback:
                raise
            warnings.warn(
                f"{type(self.module).__name__} runs in torch: {_reason(error)}", stacklevel=4
            )
            self._plans[key] = None
            return None
        compiled_calls.append(compiled)
        return compiled

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the wrapped module's parameters, by its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the wrapped module's buffers, by its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # sessions cannot be copied


def _without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    own = f"{prefix}{_OWN}"
    for name in [n for n in state if n.startswith(own)]:
        state[prefix + name.removeprefix(own)] = state.pop(name)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [n for n in state if n.startswith(prefix)]:
        state[f"{prefix}{_OWN}{name.removeprefix(prefix)}"] = state.pop(name)


def _in_full_precision(module: nn.Module, call: FlatArguments) -> FlatArguments:
    """Undo what autocast has done to the inputs, which the sessions do not know of."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return call
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return call
    (dtype,) = dtypes
    tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in call.tensors)
    return dataclasses.replace(call, tensors=tensors)


def _reason(error: OnnxTrainError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith("hint:"))


__all__ = ["TrainableModule"]
