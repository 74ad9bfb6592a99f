"""A torch module whose forward and backward passes run on ONNX Runtime."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxtrain.autodiff.gradients import lift
from onnxtrain.autodiff.opening import open_model
from onnxtrain.autodiff.split import Split, split
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes import running_statistics
from onnxtrain.graph.randomness import portable_dropout
from onnxtrain.runtime import session as runtime
from onnxtrain.torch.exporting import from_torch, last_report

_RNG = "onnxtrain.rng"


class TrainableModule(nn.Module):
    """Runs a module's forward and backward passes as two ONNX sessions.

    It is a module like any other: its parameters are the wrapped module's, so every torch optimizer,
    gradient accumulation, hooks and ``DistributedDataParallel`` work. The module is exported again
    when the mode, or rank, dtype or gradient needs of an input change; a change of batch size costs
    nothing. Buffers such as running statistics are updated as torch does; dropout masks are drawn
    anew for each call from torch's generator.

    Args:
        module: what to run.
        fallback: run the module in torch, with a warning, if it cannot be exported or differentiated.
        threads: of onnxruntime's pool; ``None`` takes all cores.
    """

    def __init__(
        self, module: nn.Module, *, fallback: bool = False, threads: int | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.fallback = fallback
        self.threads = threads
        self._plans: dict[Any, _Plan | None] = {}

    def forward(self, *inputs: Any) -> Any:
        """Give what the wrapped module gives."""
        need = torch.is_grad_enabled()
        key = (self.training, need, tuple(_kind(x, need) for x in inputs))
        if key not in self._plans:
            self._plans[key] = self._plan(inputs, need)
        plan = self._plans[key]
        if plan is None:
            return self.module(*inputs)
        named = dict(self.module.named_parameters())
        parameters = [named[n] for n in plan.parameters]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        outputs = _Run.apply(plan, self, *tensors, *parameters)
        return outputs[0] if plan.single else tuple(outputs)

    def _plan(self, inputs: Sequence[Any], need: bool) -> _Plan | None:
        try:
            return _make_plan(self.module, inputs, self.training, need, self.threads)
        except OnnxTrainError as error:
            if not self.fallback:
                raise
            warnings.warn(
                f"{type(self.module).__name__} runs in torch: {str(error).splitlines()[0]}",
                stacklevel=3,
            )
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainableModule:
        import copy

        twin = TrainableModule(
            copy.deepcopy(self.module, memo), fallback=self.fallback, threads=self.threads
        )
        return twin.train(self.training)


@dataclasses.dataclass
class _Plan:
    """Two sessions and what they exchange."""

    cut: Split
    forward: Any
    backward: Any
    inputs: list[str]
    parameters: list[str]
    """Names in the module, one per distinct parameter, in the order of the graph."""
    stored: list[str]
    """Names of the same in the graph."""
    outputs: list[str]
    buffers: dict[str, str]
    """Output of the forward graph -> buffer of the module."""
    read: list[str]
    """Buffers that the graph takes as inputs."""
    random: bool
    single: bool


def _make_plan(
    module: nn.Module, inputs: Sequence[Any], training: bool, need: bool, threads: int | None
) -> _Plan:
    model = from_torch(module, tuple(inputs), train=training)
    names = last_report(model).names
    parameters, stored = [], []
    for name, at in names.items():
        if at not in stored:
            parameters.append(name)
            stored.append(at)
    work = open_model(model)
    graph = work.graph
    shown = [y.name or "" for y in graph.outputs]
    portable_dropout(work, rng_input_name=_RNG)
    random = any(x.name == _RNG for x in graph.inputs)
    op = OpBuilder(graph, "module/")
    changed: dict[str, str] = {}
    for buffer in running_statistics(work, op) if training else []:
        out = op.Identity(buffer.new)
        out.name = f"{buffer.name}.out"
        graph.outputs.append(out)
        changed[out.name] = buffer.name
    known = [n for n, _ in module.named_buffers() if n in graph.initializers]
    lift(graph, [graph.initializers[n] for n in known])
    labels = [x.name or "" for x in model.graph.inputs]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    wanted = [n for n, x in zip(labels, tensors, strict=False) if need and x.requires_grad]
    trained = [
        at
        for name, at in zip(parameters, stored, strict=True)
        if at in graph.initializers and (not need or module.get_parameter(name).requires_grad)
    ]
    still = [at for at in stored if at in graph.initializers and at not in trained]
    lift(graph, [graph.initializers[n] for n in still])
    cut = split(work, [*wanted, *trained], shown) if wanted or trained else None
    if cut is None:
        raise OnnxTrainError("nothing to differentiate: no parameter and no input needs a gradient")
    return _Plan(
        cut=cut,
        forward=runtime.create(cut.forward.SerializeToString(), threads=threads),
        backward=runtime.create(cut.backward.SerializeToString(), threads=threads)
        if need
        else None,
        inputs=labels,
        parameters=parameters,
        stored=stored,
        outputs=shown,
        buffers=changed,
        read=known,
        random=random,
        single=len(shown) == 1,
    )


class _Run(torch.autograd.Function):
    """The two sessions as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, owner: TrainableModule, *tensors: torch.Tensor) -> Any:
        count = len(plan.inputs)
        feeds = {n: _array(t) for n, t in zip(plan.inputs, tensors[:count], strict=True)}
        feeds |= {n: _array(t) for n, t in zip(plan.stored, tensors[count:], strict=True)}
        buffers = dict(owner.module.named_buffers())
        feeds |= {n: _array(buffers[n]) for n in plan.read}
        if plan.random:
            draw = torch.randint(0, 1 << 24, (2,)).numpy().astype(np.float32)
            feeds[_RNG] = draw
        known = {i.name for i in plan.forward.get_inputs()}
        names = [o.name for o in plan.forward.get_outputs()]
        run = runtime.run(plan.forward, names, {n: v for n, v in feeds.items() if n in known})
        made = dict(zip(names, run, strict=True))
        with torch.no_grad():
            for out, name in plan.buffers.items():
                buffers[name].copy_(torch.from_numpy(made[out]))
            for name, buffer in buffers.items():
                if plan.buffers and name.endswith("num_batches_tracked"):
                    buffer.add_(1)
        ctx.plan = plan
        ctx.kept = {n: made[n] for n in plan.cut.saved} | {n: feeds[n] for n in plan.cut.passed}
        ctx.names = [*plan.inputs, *plan.stored]
        outputs = [torch.from_numpy(made[n]) for n in plan.outputs]
        ctx.shapes = {n: made[n].shape for n in plan.outputs}
        ctx.dtypes = {n: made[n].dtype for n in plan.outputs}
        whole = [t for t in outputs if not t.is_floating_point()]
        ctx.mark_non_differentiable(*whole)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        plan: _Plan = ctx.plan
        feeds = dict(ctx.kept)
        for name, g in zip(plan.outputs, grads, strict=True):
            if name not in plan.cut.outputs:
                continue
            zeros = np.zeros(ctx.shapes[name], ctx.dtypes[name])
            feeds[f"{name}_grad"] = zeros if g is None else _array(g)
        known = {i.name for i in plan.backward.get_inputs()}
        found = runtime.run(plan.backward, None, {n: v for n, v in feeds.items() if n in known})
        by_name = {n: torch.from_numpy(v) for n, v in zip(plan.cut.wrt, found, strict=True)}
        return (None, None, *(by_name.get(n) for n in ctx.names))


def _array(t: torch.Tensor) -> np.ndarray:
    return t.detach().cpu().contiguous().numpy()


def _kind(x: Any, need: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    return (x.dim(), x.dtype, tuple(x.shape[1:]), need and x.requires_grad)


__all__ = ["TrainableModule"]
