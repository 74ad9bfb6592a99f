"""``onnxruntime.training.optim``: optimizer configurations and warm-up schedules."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain import optim
from onnxtrain.errors import CompatError, expected_one_of
from onnxtrain.optim.transforms import Transform, Update, add_weight_decay, chain, scale_by_adam


@dataclasses.dataclass
class TrainStepInfo:
    """Information about a step, for schedules and loss scalers."""

    optimizer_config: Any
    all_finite: bool = True
    fetches: list[str] = dataclasses.field(default_factory=list)
    optimization_step: int = 0
    step: int = 0


class _OptimizerConfig:
    """Base of optimizer configurations: name, parameter groups and default settings."""

    _fixed: tuple[str, ...] = ()

    def __init__(self, name: str, params: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]):
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = dict(defaults)
        self.params = [dict(group) for group in params]
        for group in self.params:
            unknown = set(group) - set(defaults) - {"params"}
            if "params" not in group or "lr" in group or unknown:
                raise ValueError(
                    "a parameter group has 'params' and settings of the optimizer, but no 'lr': "
                    f"{sorted(group)}"
                )
        for key, value in defaults.items():
            setattr(self, key, value)

    def to_optimizer(self) -> optim.Optimizer:
        """Return the equivalent onnxtrain optimizer."""
        raise NotImplementedError

    def optimizer_for(self, names: Sequence[str]) -> optim.Optimizer:
        """Return the optimizer for these weights."""
        for group in self.params:
            unknown = [n for n in group["params"] if n not in names]
            if unknown:
                raise ValueError(
                    f"unknown parameter in a parameter group: {unknown[0]!r} "
                    f"{expected_one_of(unknown[0], names)}"
                )
        return self.to_optimizer()

    @property
    def clip(self) -> float | None:
        """The largest global norm of the gradients."""
        return self.defaults.get("max_norm_clip")

    def groups(self) -> tuple[optim.ParamGroup, ...]:
        """Return the groups; only weight decay may differ between them."""
        groups = []
        for group in self.params:
            for key, value in group.items():
                if key not in ("params", "lambda_coef") and value != self.defaults[key]:
                    raise CompatError(
                        f"a parameter group sets {key}; only lambda_coef may differ here\n"
                        f"hint: set {key} for all parameters"
                    )
            decay = group.get("lambda_coef", self.defaults.get("lambda_coef", 0.0))
            groups += [
                optim.ParamGroup(literal(n), weight_decay=float(decay)) for n in group["params"]
            ]
        return tuple(groups)


def literal(name: str) -> str:
    """Return a glob pattern that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


class SGDConfig(_OptimizerConfig):
    """Plain gradient descent."""

    def __init__(self, params: Sequence[Any] = (), lr: float = 0.001) -> None:
        if params:
            raise ValueError("'params' must be empty for SGD optimizer")
        super().__init__("SGDOptimizer", params, {"lr": lr})

    def to_optimizer(self) -> optim.Optimizer:
        """Return SGD."""
        return optim.SGD(lr=self.lr)


class AdamConfig(_OptimizerConfig):
    """Adam with decoupled weight decay, before or after the update."""

    class DecayMode(enum.IntEnum):
        """When the weights decay."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        super().__init__("AdamOptimizer", params, settings)

    def to_optimizer(self) -> optim.Optimizer:
        """Return AdamW; decay before the update is torch's variant, after it Hugging Face's."""
        d = self.defaults
        return optim.AdamW(
            lr=self.lr,
            betas=(float(d["alpha"]), float(d["beta"])),
            eps=float(d["epsilon"]),
            weight_decay=float(d["lambda_coef"]),
            correct_bias=bool(d["do_bias_correction"]),
            form="hf" if int(d["weight_decay_mode"]) else "torch",
            groups=self.groups(),
        )


class LambConfig(_OptimizerConfig):
    """LAMB, with bounds for the trust ratio."""

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = float("-inf"),
        ratio_max: float = float("inf"),
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        super().__init__("LambOptimizer", params, settings)

    def to_optimizer(self) -> optim.Optimizer:
        """Return LAMB with these bounds."""
        d = self.defaults
        return BoundedLamb(
            lr=self.lr,
            betas=(float(d["alpha"]), float(d["beta"])),
            eps=float(d["epsilon"]),
            weight_decay=float(d["lambda_coef"]),
            ratio_min=max(float(d["ratio_min"]), 0.0),
            ratio_max=min(float(d["ratio_max"]), 3e38),
            correct_bias=bool(d["do_bias_correction"]),
            groups=self.groups(),
        )


_CONFIGS = {
    "SGDOptimizer": SGDConfig,
    "AdamOptimizer": AdamConfig,
    "LambOptimizer": LambConfig,
}


class ConfigFromAttributes:
    """An optimizer configuration given by name and by attributes of each weight.

    ``ORTTrainer(map_optimizer_attributes=...)`` and ``TrainingParameters`` describe one this way.
    """

    def __init__(self, name: str, attributes: Callable[[str], Mapping[str, Any]] | None) -> None:
        if name not in _CONFIGS:
            raise CompatError(f"unknown optimizer: {name!r} {expected_one_of(name, _CONFIGS)}")
        self.lr = 0.001
        self._kind = _CONFIGS[name]
        self._attributes = attributes

    @property
    def clip(self) -> float | None:
        """The largest global norm of the gradients."""
        return self._config("").clip

    def _config(self, weight: str) -> Any:
        attributes = {} if self._attributes is None else dict(self._attributes(weight) or {})
        # "lambda" is a keyword in Python, so the configurations call it lambda_coef.
        settings = {"lambda_coef" if k == "lambda" else k: v for k, v in attributes.items()}
        try:
            return self._kind(**settings)
        except TypeError as error:
            raise CompatError(f"map_optimizer_attributes: {error}") from error

    def to_optimizer(self) -> Any:
        """Return the optimizer with the attributes that apply to unnamed weights."""
        return self.optimizer_for(())

    def optimizer_for(self, names: Sequence[str]) -> optim.Optimizer:
        """Return the optimizer for these weights; only weight decay may differ between them."""
        common = self._config(names[0] if names else "")
        groups = []
        for name in names:
            own = self._config(name)
            for key, value in own.defaults.items():
                if key != "lambda_coef" and value != common.defaults[key]:
                    raise CompatError(
                        f"map_optimizer_attributes: {name!r} has another {key}; "
                        "only lambda may differ here"
                    )
            if own.defaults.get("lambda_coef") != common.defaults.get("lambda_coef"):
                decay = float(own.defaults["lambda_coef"])
                groups.append(optim.ParamGroup(literal(name), weight_decay=decay))
        return dataclasses.replace(common.to_optimizer(), groups=tuple(groups))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedLamb(optim.Optimizer):
    """LAMB with bounds for the trust ratio and an optional correction of the bias."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    ratio_min: float = 0.0
    ratio_max: float = 3e38
    correct_bias: bool = False

    def chain(self, weight_decay: float) -> tuple[Transform, ...]:
        """Adam's scaling, decay, bounded trust ratio."""
        return chain(
            scale_by_adam(*self.betas, self.eps, correct=self.correct_bias),
            add_weight_decay(weight_decay),
            Transform(self._trust),
        )

    def _trust(self, u: Update) -> None:
        u.apply_pending_scale()
        op = u.op

        def norm(x: ir.Value) -> ir.Value:
            return op.Sqrt(op.ReduceSum(op.Mul(x, x), keepdims=0))

        size, change = norm(u.parameter), norm(u.gradient)
        usable = op.And(op.Greater(size, 0.0), op.Greater(change, 0.0))
        ratio = op.Where(usable, op.Div(size, op.Where(usable, change, 1.0)), 1.0)
        low, high = (op.const(v, u.gradient.dtype) for v in (self.ratio_min, self.ratio_max))
        u.gradient = op.Mul(u.gradient, op.Clip(ratio, low, high))


class LRSchedulerBase:
    """Base of schedules: a factor of the configured rate, by step."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def factor(self, step: int, base: float) -> float:
        """Return the factor of the configured learning rate."""
        raise NotImplementedError

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Return the learning rate of a step."""
        base = train_step_info.optimizer_config.lr
        return [base * self.factor(train_step_info.optimization_step, base)]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of the last step."""
        return self._last_lr

    def _step(self, train_step_info: TrainStepInfo) -> None:
        self._last_lr = self.get_lr(train_step_info)


class _Warmup(LRSchedulerBase):
    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        if not (isinstance(total_steps, int) and total_steps > 0):
            raise ValueError("total_steps must be a strict positive number")
        if not 0.0 <= warmup < 1.0:
            raise ValueError("warmup must be a number in [0, 1)")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = warmup * total_steps

    def factor(self, step: int, base: float) -> float:
        """Return the warmup factor, then the factor of the schedule."""
        if step < self._warmup_steps:
            return step / max(1.0, self._warmup_steps)
        span = max(1.0, self.total_steps - self._warmup_steps)
        return self.after((step - self._warmup_steps) / span, base)

    def after(self, progress: float, base: float) -> float:
        """Return the factor after the warm-up."""
        raise NotImplementedError


class ConstantWarmupLRScheduler(_Warmup):
    """Linear warmup, then a constant learning rate."""

    def after(self, progress: float, base: float) -> float:
        """Return 1."""
        return 1.0


class CosineWarmupLRScheduler(_Warmup):
    """Linear warmup, then cosine annealing."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError("cycles must be a strict positive number")
        self.cycles = cycles

    def after(self, progress: float, base: float) -> float:
        """Return the cosine factor."""
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * progress)))


class LinearWarmupLRScheduler(_Warmup):
    """Linear warmup, then linear decay to zero."""

    def after(self, progress: float, base: float) -> float:
        """Return the linear factor."""
        return max(0.0, 1.0 - progress)


class PolyWarmupLRScheduler(_Warmup):
    """Linear warmup, then polynomial decay to ``lr_end``."""

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if lr_end < 0 or power < 0:
            raise ValueError("lr_end and power must be positive numbers")
        self.lr_end = lr_end
        self.power = power

    def after(self, progress: float, base: float) -> float:
        """Return the polynomial factor."""
        if not base > self.lr_end:
            raise ValueError(f"lr_end ({self.lr_end}) must be smaller than lr ({base})")
        decay = max(0.0, 1.0 - progress) ** self.power
        return ((base - self.lr_end) * decay + self.lr_end) / base


_LRScheduler = LRSchedulerBase
lr_scheduler = sys.modules[__name__]
"""The name of a submodule of onnxruntime-training."""


def __getattr__(name: str) -> Any:
    if name in ("AdamWMode", "FusedAdam"):  # these need torch, which this module does not
        return getattr(importlib.import_module("onnxtrain.compat.ort.fused_adam"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AdamConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "TrainStepInfo",
    "lr_scheduler",
]
