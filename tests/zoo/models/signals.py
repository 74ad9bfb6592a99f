"""Spectra, patches and determinants: FNet, a spectrogram CNN, fold and unfold, a linear flow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import integers, normal, register


@register("fnet", integers(20, 6))
class FNet(nn.Module):
    """Token mixing by the real part of a two-dimensional Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token)
        mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        x = self.norm1(x + mixed)
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return self.head(x.mean(dim=1))


@register("spectrogram", normal(48))
class SpectrogramCnn(nn.Module):
    """A learned filter, a short-time power spectrum in decibels, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2)
        self.conv = nn.Conv2d(1, 3, 3)
        self.head = nn.Linear(3, 4)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, wave: Tensor) -> Tensor:
        wave = self.filter(wave.unsqueeze(1)).squeeze(1)
        spectrum = torch.stft(wave, 16, 8, window=self.window, center=False, return_complex=True)
        power = spectrum.real.pow(2) + spectrum.imag.pow(2)
        level = torch.log10(power + 1e-3).unsqueeze(1)
        return self.head(torch.relu(self.conv(level)).amax(dim=(2, 3)))


@register("patch_fold", normal(2, 8, 8))
class PatchFold(nn.Module):
    """Overlapping patches transformed one by one and put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.patch = nn.Linear(18, 18)

    def forward(self, image: Tensor) -> Tensor:
        columns = F.unfold(self.conv(image), 3, stride=2, padding=1)
        columns = torch.tanh(self.patch(columns.transpose(1, 2))).transpose(1, 2)
        return F.fold(columns, (8, 8), 3, stride=2, padding=1)


@register("linear_flow", normal(9))
class LinearFlow(nn.Module):
    """Samples pushed through matrices that depend on them, with the log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        matrix = 0.4 * torch.tanh(self.matrix(x)).view(-1, 3, 3)
        matrix = matrix + 2 * torch.eye(3, dtype=x.dtype)
        moved = (matrix @ x.view(-1, 3, 3)).flatten(1)
        return moved, torch.log(torch.linalg.det(matrix))
