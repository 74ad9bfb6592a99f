"""``FusedAdam``: Adam and both variants of AdamW in one torch optimizer.

The updates are those of the old CUDA kernel, computed by torch on any device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamWMode(enum.IntEnum):
    """Where the weight decay is added."""

    ADAM_L2_REGULARIZATION = 0
    """To the gradient, as in ``torch.optim.Adam``."""
    ADAMW_TRANSFORMERS = 1
    """To the updated parameter, as in Hugging Face's AdamW."""
    ADAMW_TORCH = 2
    """To the parameter before the update, as in ``torch.optim.AdamW``."""


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: correct the bias of both moments.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        adam_w_mode: where the weight decay is added.
        weight_decay: weight decay.
        set_grad_none: ``zero_grad`` sets gradients to ``None``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        super().zero_grad(set_to_none=self._set_grad_none or set_to_none)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update the parameters; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        decay, step, mode, g = group["weight_decay"], group["step"], self._mode, p.grad
        assert g is not None
        if g.is_sparse:
            raise RuntimeError(
                "FusedAdam does not support sparse gradients\nhint: use torch.optim.SparseAdam"
            )
        correct = group["bias_correction"]
        correction1 = 1 - beta1**step if correct else 1.0
        correction2 = 1 - beta2**step if correct else 1.0
        state = self.state[p]
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        if mode is AdamWMode.ADAM_L2_REGULARIZATION:
            g = g.add(p, alpha=decay)
        elif mode is AdamWMode.ADAMW_TORCH:
            p.mul_(1 - lr * decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if mode is AdamWMode.ADAMW_TRANSFORMERS:
            # eps is added before the bias is corrected.
            p.addcdiv_(m, v.sqrt().add_(eps), value=-lr * math.sqrt(correction2) / correction1)
            p.mul_(1 - lr * decay)
        else:
            p.addcdiv_(m, (v / correction2).sqrt_().add_(eps), value=-lr / correction1)


__all__ = ["AdamWMode", "FusedAdam"]
