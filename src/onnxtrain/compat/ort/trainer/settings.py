"""The two old ways to describe a training run, in one form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain import optim
from onnxtrain.compat.ort import optim as configs
from onnxtrain.compat.ort.amp import LossScaler
from onnxtrain.compat.ort.trainer.descriptions import IODescription, ModelDescription, Signature
from onnxtrain.compat.ort.trainer.options import ORTTrainerOptions
from onnxtrain.errors import CompatError

Loss = Callable[..., Any] | None

_NAMES = {
    "SGDOptimizer": configs.SGDConfig,
    "AdamOptimizer": configs.AdamConfig,
    "LambOptimizer": configs.LambConfig,
}
_OLD_WORDS = {"lambda": "lambda_coef"}


@dataclasses.dataclass
class Settings:
    """What a training run needs to know besides the model."""

    signature: Signature
    config: Any
    device: str
    accumulate: int = 1
    clip: bool = True
    frozen: Sequence[str] = ()
    schedule: Any = None
    mixed: bool = False
    scaler: LossScaler | None = None
    rate_input: bool = False
    """The learning rate is the last argument of ``train_step``."""
    get_lr: Callable[[int], float] | None = None


def later_form(
    model_desc: Mapping[str, Any],
    optim_config: Any = None,
    loss_fn: Loss = None,
    options: ORTTrainerOptions | None = None,
) -> tuple[Loss, Settings]:
    """Read ``(model_desc, optim_config, loss_fn, options)``."""
    o: Any = options if options is not None else ORTTrainerOptions()
    if o.distributed.world_size != 1:
        raise CompatError(
            "ORTTrainer trains in one process here\n"
            "hint: onnxtrain.torch.TrainableModule in DistributedDataParallel"
        )
    return loss_fn, Settings(
        Signature.of(model_desc),
        optim_config,
        _device(o.device.id),
        accumulate=o.batch.gradient_accumulation_steps,
        clip=o.utils.grad_norm_clip,
        frozen=o.utils.frozen_weights,
        schedule=o.lr_scheduler,
        mixed=o.mixed_precision.enabled,
        scaler=o.mixed_precision.loss_scaler,
    )


def old_form(
    loss_fn: Loss,
    model_desc: ModelDescription,
    training_optimizer_name: str,
    map_optimizer_attributes: Callable[[str], Mapping[str, Any]] | None = None,
    learning_rate_description: IODescription | None = None,
    device: Any = "cpu",
    gradient_accumulation_steps: int = 1,
    world_rank: int = 0,
    world_size: int = 1,
    use_mixed_precision: bool = False,
    allreduce_post_accumulation: bool = False,
    global_step: int = 0,
    get_lr_this_step: Callable[[int], float] | None = None,
    loss_scaler: LossScaler | None = None,
    deepspeed_zero_stage: int = 0,
    enable_grad_norm_clip: bool = True,
    frozen_weights: Sequence[str] = (),
    **without_effect: Any,
) -> tuple[Loss, Settings]:
    """Read the older form; what concerns memory and speed only has no effect."""
    if world_size != 1:
        raise CompatError(
            "ORTTrainer trains in one process here\n"
            "hint: onnxtrain.torch.TrainableModule in DistributedDataParallel"
        )
    return loss_fn, Settings(
        Signature.of(model_desc),
        Attributes(training_optimizer_name, map_optimizer_attributes),
        _device(device),
        accumulate=gradient_accumulation_steps,
        clip=enable_grad_norm_clip,
        frozen=frozen_weights,
        mixed=use_mixed_precision,
        scaler=loss_scaler,
        rate_input=get_lr_this_step is None,
        get_lr=get_lr_this_step,
    )


class Attributes:
    """The configuration that ``map_optimizer_attributes`` describes, weight by weight."""

    def __init__(self, name: str, attributes: Callable[[str], Mapping[str, Any]] | None) -> None:
        if name not in _NAMES:
            raise CompatError(f"no such optimizer: {name!r}\nhint: {', '.join(_NAMES)}")
        self.lr = 0.001
        self._kind = _NAMES[name]
        self._attributes = attributes

    @property
    def clip(self) -> float | None:
        """The largest joint norm of the gradients."""
        return self._config("").clip

    def _config(self, weight: str) -> Any:
        given = {} if self._attributes is None else dict(self._attributes(weight) or {})
        settings = {_OLD_WORDS.get(k, k): v for k, v in given.items()}
        try:
            return self._kind(**settings)
        except TypeError as error:
            raise CompatError(f"map_optimizer_attributes: {error}") from error

    def to_optimizer(self) -> Any:
        """Return the optimizer of a weight without a name."""
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
                groups.append(optim.ParamGroup(configs.literal(name), weight_decay=decay))
        return dataclasses.replace(common.to_optimizer(), groups=tuple(groups))


def _device(device: Any) -> str:
    return str(device).split(":")[0]
