"""The two sessions of a compiled call as one differentiable function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from onnxtrain.runtime import session as runtime
from onnxtrain.torch.compiled_call import RNG, CompiledCall, Session
from onnxtrain.torch.dlpack import to_array, to_runtime, to_torch


class Run(torch.autograd.Function):
    """Forward and backward of a compiled call."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledCall, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Run the forward session; keep what the backward session reads."""
        named = dict(zip([*compiled.inputs, *compiled.stored], tensors, strict=True))
        made = run_forward(compiled, module, named)
        outputs = [made[n] for n in compiled.outputs]
        # Through torch, so that it frees them in time and notices changes in place.
        kept = [made[n] for n in compiled.saved] + [named[n] for n in compiled.passed if n in named]
        ctx.save_for_backward(*kept)
        ctx.compiled = compiled
        ctx.others = {n: made[n] for n in compiled.passed if n not in named}
        ctx.outputs = {n: (made[n].shape, made[n].dtype) for n in compiled.differentiable}
        ctx.mark_non_differentiable(
            *(made[n] for n in compiled.outputs if n not in compiled.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> Any:
        """Run the backward session."""
        compiled: CompiledCall = ctx.compiled
        own = set(compiled.inputs) | set(compiled.stored)
        names = [*compiled.saved, *(n for n in compiled.passed if n in own)]
        feeds = dict(zip(names, ctx.saved_tensors, strict=True)) | ctx.others
        given = dict(zip(compiled.outputs, grads, strict=True))
        for name, at in zip(compiled.differentiable, compiled.cotangents, strict=True):
            g = given[name]
            if g is None:
                shape, dtype = ctx.outputs[name]
                g = torch.zeros(shape, dtype=dtype, device=compiled.device)
            feeds[at] = g
        assert compiled.backward is not None
        gradients = _run(compiled, compiled.backward, feeds)
        by_name = dict(zip(compiled.wrt, gradients.values(), strict=True))
        return (None, None, *(by_name.get(n) for n in (*compiled.inputs, *compiled.stored)))


def run_forward(
    compiled: CompiledCall, module: nn.Module, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run the forward session and update the module's buffers; return everything it put out."""
    assert compiled.forward is not None
    buffers: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    if compiled.read or compiled.buffers:
        buffers = dict(module.named_buffers())
        taken = compiled.forward.inputs
        others = {at: buffers[n].clone() for at, n in compiled.read.items() if at in taken}
    if compiled.random:
        draw = torch.randint(0, 1 << 24, (2,)).to(torch.float32)
        others[RNG] = draw.to(compiled.device)
    made = _run(compiled, compiled.forward, {**named, **others})
    if compiled.buffers or compiled.counters:
        with torch.no_grad():
            for out, name in compiled.buffers.items():
                buffers[name].copy_(made[out])
            for name in compiled.counters:
                buffers[name].add_(1)
    return {**others, **made}


def _run(
    compiled: CompiledCall, at: Session, feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if compiled.device.type == "cpu" and at.arrays:
        # Arrays share memory as OrtValues do, and cost a third of the time to hand over.
        arrays = {n: to_array(feeds[n]) for n in at.inputs}
        results = runtime.run(at.session, at.outputs, arrays)
        return {n: torch.from_numpy(a) for n, a in zip(at.outputs, results, strict=True)}
    values = {n: to_runtime(feeds[n]) for n in at.inputs}
    if compiled.device.type == "cpu":
        outputs = runtime.run_values(at.session, at.outputs, values)
    else:
        outputs = _run_bound(compiled, at, values)
    return {n: to_torch(v) for n, v in zip(at.outputs, outputs, strict=True)}


def _run_bound(compiled: CompiledCall, at: Session, values: Mapping[str, Any]) -> list[Any]:
    """Run with results left where the call's device is."""
    binding = at.session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in at.outputs:
        binding.bind_output(name, compiled.device.type, compiled.device.index or 0)
    torch.cuda.current_stream(compiled.device).synchronize()
    runtime.run_bound(at.session, binding)
    return list(binding.get_outputs())
