"""The two sessions of a plan as one differentiable function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from onnxtrain.runtime import session as runtime
from onnxtrain.torch.exchange import to_array, to_runtime, to_torch
from onnxtrain.torch.plans import RNG, Plan, Session


class Run(torch.autograd.Function):
    """Forward and backward of a plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, module: nn.Module, *tensors: torch.Tensor) -> Any:
        """Run the forward session; keep what the backward session reads."""
        named = dict(zip([*plan.inputs, *plan.stored], tensors, strict=True))
        made = run_forward(plan, module, named)
        outputs = [made[n] for n in plan.outputs]
        # Through torch, so that it frees them in time and notices changes in place.
        kept = [made[n] for n in plan.saved] + [named[n] for n in plan.passed if n in named]
        ctx.save_for_backward(*kept)
        ctx.plan = plan
        ctx.others = {n: made[n] for n in plan.passed if n not in named}
        ctx.outputs = {n: (made[n].shape, made[n].dtype) for n in plan.differentiable}
        ctx.mark_non_differentiable(
            *(made[n] for n in plan.outputs if n not in plan.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> Any:
        """Run the backward session."""
        plan: Plan = ctx.plan
        own = set(plan.inputs) | set(plan.stored)
        names = [*plan.saved, *(n for n in plan.passed if n in own)]
        feeds = dict(zip(names, ctx.saved_tensors, strict=True)) | ctx.others
        given = dict(zip(plan.outputs, grads, strict=True))
        for name, at in zip(plan.differentiable, plan.cotangents, strict=True):
            g = given[name]
            if g is None:
                shape, dtype = ctx.outputs[name]
                g = torch.zeros(shape, dtype=dtype, device=plan.device)
            feeds[at] = g
        assert plan.backward is not None
        found = _run(plan, plan.backward, feeds)
        by_name = dict(zip(plan.wrt, found.values(), strict=True))
        return (None, None, *(by_name.get(n) for n in (*plan.inputs, *plan.stored)))


def run_forward(
    plan: Plan, module: nn.Module, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run the forward session and update the module's buffers; give everything it put out."""
    assert plan.forward is not None
    buffers: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    if plan.read or plan.buffers:
        buffers = dict(module.named_buffers())
        taken = plan.forward.inputs
        others = {at: buffers[n].clone() for at, n in plan.read.items() if at in taken}
    if plan.random:
        draw = torch.randint(0, 1 << 24, (2,)).to(torch.float32)
        others[RNG] = draw.to(plan.device)
    made = _run(plan, plan.forward, {**named, **others})
    if plan.buffers or plan.counters:
        with torch.no_grad():
            for out, name in plan.buffers.items():
                buffers[name].copy_(made[out])
            for name in plan.counters:
                buffers[name].add_(1)
    return {**others, **made}


def _run(plan: Plan, at: Session, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if plan.device.type == "cpu" and at.arrays:
        # Arrays share memory as OrtValues do, and cost a third of the time to hand over.
        arrays = {n: to_array(feeds[n]) for n in at.inputs}
        results = runtime.run(at.session, at.outputs, arrays)
        return {n: torch.from_numpy(a) for n, a in zip(at.outputs, results, strict=True)}
    values = {n: to_runtime(feeds[n]) for n in at.inputs}
    if plan.device.type == "cpu":
        found = runtime.run_values(at.session, at.outputs, values)
    else:
        found = _run_bound(plan, at, values)
    return {n: to_torch(v) for n, v in zip(at.outputs, found, strict=True)}


def _run_bound(plan: Plan, at: Session, values: Mapping[str, Any]) -> list[Any]:
    """Run with results left where the plan's device is."""
    binding = at.session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in at.outputs:
        binding.bind_output(name, plan.device.type, plan.device.index or 0)
    torch.cuda.current_stream(plan.device).synchronize()
    runtime.run_bound(at.session, binding)
    return list(binding.get_outputs())
