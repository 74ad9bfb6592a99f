"""Sequence models: LSTM, GRU, RNN, bidirectional LSTM, TCN, WaveNet-like, Mamba-like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .base import integers, normal, register


@register("lstm", integers(20, 6), dropout=True)
class LstmLm(nn.Module):
    """A two-layer language model that starts from zero states and returns its last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 10)
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(12, 20)

    def forward(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, (hidden, cell) = self.lstm(self.embed(token))
        return F.log_softmax(self.head(self.dropout(x)), dim=-1), hidden, cell


@register("gru", normal(6, 8), fast=True)
class GruClassifier(nn.Module):
    """The last hidden state of a two-layer GRU, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


@register("bilstm", integers(20, 7))
class BiLstmTagger(nn.Module):
    """A tag for each token from both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(token))[0])


@register("rnn_tanh", normal(5, 6))
class RnnTanh(nn.Module):
    """Elman's network in both directions, started from a learned state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, 8, batch_first=True, bidirectional=True)
        self.start = nn.Parameter(0.3 * torch.randn(2, 1, 8))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(-1, x.shape[0], -1).contiguous()
        return self.head(self.rnn(x, start)[0].mean(dim=1))


@register("seq2seq_attention", normal(6, 5), integers(12, 4))
class Seq2SeqAttention(nn.Module):
    """A GRU encoder and LSTM cells that attend to it by additive scores, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(5, 8, batch_first=True)
        self.embed = nn.Embedding(12, 6)
        self.cell = nn.LSTMCell(14, 8)
        self.key, self.query = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.score = nn.Linear(8, 1, bias=False)
        self.head = nn.Linear(16, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(source)
        keys, hidden = self.key(memory), last.squeeze(0)
        cell = torch.zeros_like(hidden)
        outputs = []
        for step in range(target.shape[1]):
            score = self.score(torch.tanh(keys + self.query(hidden).unsqueeze(1)))
            context = (torch.softmax(score, dim=1) * memory).sum(dim=1)
            word = self.embed(target[:, step])
            hidden, cell = self.cell(torch.cat([word, context], dim=-1), (hidden, cell))
            outputs.append(self.head(torch.cat([hidden, context], dim=-1)))
        return torch.stack(outputs, dim=1)


class TemporalBlock(nn.Module):
    """Two weight-normed dilated causal convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
        self.dropout = nn.Dropout(0.2)
        self.skip = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.relu(self.conv1(F.pad(x, (self.pad, 0)))))
        y = self.dropout(torch.relu(self.conv2(F.pad(y, (self.pad, 0)))))
        return torch.relu(y + self.skip(x))


@register("tcn", normal(3, 12), dropout=True, fast=True)
class Tcn(nn.Module):
    """Temporal blocks with growing dilation; the last step is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TemporalBlock(3, 8, 1), TemporalBlock(8, 8, 2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, :, -1])


@register("wavenet", integers(16, 12))
class WaveNet(nn.Module):
    """Gated dilated convolutions whose skip outputs are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=d) for d in (1, 2, 4))
        self.residual = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))
        self.skip = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 16, 1))

    def forward(self, sample: Tensor) -> Tensor:
        x = self.embed(sample).transpose(1, 2)
        total = 0
        for index, gated in enumerate(self.gated):
            y = F.glu(gated(F.pad(x, (2**index, 0))), dim=1)
            total = total + self.skip[index](y)
            if index < len(self.residual):
                x = x + self.residual[index](y)
        return self.head(total)


@register("mamba", normal(6, 8))
class Mamba(nn.Module):
    """A selective state space block: causal depthwise convolution, input-dependent scan, gate."""

    def __init__(self, width: int = 8, inner: int = 12, state: int = 4) -> None:
        super().__init__()
        self.inner, self.state = inner, state
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.select = nn.Linear(inner, 2 + 2 * state, bias=False)
        self.rate = nn.Linear(2, inner)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(inner, 1)))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        signal = self.conv(signal.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        signal = F.silu(signal)
        step, into, out = self.select(signal).split([2, self.state, self.state], dim=-1)
        step = F.softplus(self.rate(step))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.log_decay))
        drive = (step * signal).unsqueeze(-1) * into.unsqueeze(2)
        state = torch.zeros_like(drive[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * out[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(outputs, dim=1) + self.skip * signal
        return x + self.leave(y * F.silu(gate))
