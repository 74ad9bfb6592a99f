"""Models whose graphs hold If, Scan and Loop, as torch's structured control flow exports them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from .base import normal, register


@register("early_exit", normal(6))
class EarlyExit(nn.Module):
    """A cheap head where the batch looks easy, a deep one where not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.cheap = nn.Linear(8, 3)
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return torch.cond(hidden.mean() > 0, self.cheap, self.deep, (hidden,))


@register("late_exit", normal(6))
class LateExit(EarlyExit):
    """The same with the branches exchanged, so that both are taken by one of the two models."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return torch.cond(hidden.mean() <= 0, self.cheap, self.deep, (hidden,))


@register("scan_rnn", normal(7, 5))
class ScanRnn(nn.Module):
    """A gated recurrence written as one scan over time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(5, 8), nn.Linear(8, 8)
        self.start = nn.Parameter(0.3 * torch.randn(8))
        self.head = nn.Linear(8, 3)

    def step(self, hidden: Tensor, drive: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(self.gate(hidden))
        hidden = share * hidden + (1 - share) * torch.tanh(drive)
        return hidden, hidden.clone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drive = self.enter(x).transpose(0, 1)
        hidden = self.start.expand(x.shape[0], -1).clone()
        if torch.compiler.is_exporting():
            hidden, trace = scan(self.step, hidden, drive, dim=0)
        else:
            steps = []
            for moment in drive:
                hidden, shown = self.step(hidden, moment)
                steps.append(shown)
            trace = torch.stack(steps)
        return self.head(trace.transpose(0, 1)), hidden


@register("neural_ode", normal(4))
class NeuralOde(nn.Module):
    """Four midpoint steps of a learned flow, as a while loop."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 4))

    def step(self, count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x + 0.125 * self.field(x)
        return count + 1, x + 0.25 * self.field(middle)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.tensor(0)
        if torch.compiler.is_exporting():
            return while_loop(lambda count, _: count < 4, self.step, (count, x))[1]
        for _ in range(4):
            count, x = self.step(count, x)
        return x
