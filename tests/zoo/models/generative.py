"""Generative and image-to-image networks: VAE, DCGAN pair, style transfer, super-resolution ..."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import normal, register, uniform


@register("vae", normal(1, 12, 12), normal(4))
class Vae(nn.Module):
    """Reconstruction and KL term; the noise is an input so that runs repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(144, 24), nn.ReLU())
        self.mean, self.log_var = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 144), nn.Sigmoid())

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(image)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        code = mean + noise * torch.exp(0.5 * log_var)
        divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=1)
        return self.decode(code).view_as(image), divergence.mean()


@register("dcgan_generator", normal(8, 1, 1), batch_norm=True)
def dcgan_generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 12, 4, 1, 0, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(True),
        nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1, bias=False),
        nn.Tanh(),
    )


@register("dcgan_discriminator", normal(3, 16, 16), batch_norm=True)
def dcgan_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 12, 4, 2, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(12, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
        nn.Sigmoid(),
    )


class ReflectConv(nn.Module):
    """Convolution after reflection padding, with nearest upsampling before it where asked."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride=1, upsample=None) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride)
        self.upsample = upsample

    def forward(self, x: Tensor) -> Tensor:
        if self.upsample:
            x = F.interpolate(x, scale_factor=self.upsample, mode="nearest")
        return self.conv(self.pad(x))


@register("style_transfer", normal(3, 16, 16), fast=True)
class StyleTransfer(nn.Module):
    """Down twice, one residual block, up twice; instance norm throughout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [ReflectConv(3, 6, 5), ReflectConv(6, 8, 3, 2), ReflectConv(8, 12, 3, 2)]
        layers += [ReflectConv(12, 12, 3), ReflectConv(12, 12, 3)]
        layers += [ReflectConv(12, 8, 3, upsample=2.0), ReflectConv(8, 6, 3, upsample=2.0)]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(
            nn.InstanceNorm2d(layer.conv.out_channels, affine=True) for layer in layers
        )
        self.head = ReflectConv(6, 3, 5)

    def forward(self, image: Tensor) -> Tensor:
        def step(index: int, x: Tensor) -> Tensor:
            return self.norms[index](self.layers[index](x))

        x = image
        for index in range(3):
            x = torch.relu(step(index, x))
        x = x + step(4, torch.relu(step(3, x)))
        for index in (5, 6):
            x = torch.relu(step(index, x))
        return self.head(x)


@register("super_resolution", uniform(0.0, 1.0, 1, 8, 8))
class SuperResolution(nn.Module):
    """Sub-pixel convolution (pixel shuffle) plus the bicubic image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2),
            nn.PReLU(12),
            nn.Conv2d(12, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.PixelShuffle(2),
        )
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor) -> Tensor:
        smooth = F.interpolate(image, scale_factor=2.0, mode="bicubic", align_corners=False)
        return self.body(image) + self.gain * smooth


@register("conv_autoencoder", normal(1, 16, 16))
def conv_autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.SiLU(),
        nn.Conv2d(6, 10, 3, 2, 1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Conv2d(10, 6, 3, padding=1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        nn.Conv2d(6, 1, 3, padding=1),
        nn.Hardtanh(-1.5, 1.5),
    )


class TimedBlock(nn.Module):
    """GroupNorm and SiLU convolutions with the time embedding added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


@register("diffusion_unet", normal(2, 8, 8), uniform(0.0, 100.0))
class DiffusionUNet(nn.Module):
    """A noise predictor: sinusoidal time, GroupNorm blocks, attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(-math.log(1000.0) * torch.arange(4) / 4))
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.down = TimedBlock(8, 8, 16)
        self.shrink = nn.Conv2d(8, 12, 3, 2, 1)
        self.middle = TimedBlock(12, 12, 16)
        self.norm = nn.GroupNorm(3, 12)
        self.qkv, self.out = nn.Conv2d(12, 36, 1), nn.Conv2d(12, 12, 1)
        self.up = TimedBlock(20, 8, 16)
        self.head = nn.Conv2d(8, 2, 1)

    def attend(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, c, h * w).unbind(1)
        share = torch.softmax(torch.einsum("bci,bcj->bij", q, k) / math.sqrt(c), dim=-1)
        return x + self.out(torch.einsum("bij,bcj->bci", share, v).reshape(n, c, h, w))

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        angle = step[:, None] * self.rates
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        fine = self.down(self.stem(image), time)
        x = self.attend(self.middle(self.shrink(fine), time))
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.head(self.up(torch.cat([x, fine], dim=1), time))


@register("real_nvp", normal(6))
class RealNvp(nn.Module):
    """Affine coupling layers with their log-determinant; the output is a log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3)
        )
        self.log_scale = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x * torch.exp(self.log_scale)
        log_det = self.log_scale.sum()
        for net in self.nets:
            kept, moved = z.chunk(2, dim=-1)
            scale, shift = net(kept).chunk(2, dim=-1)
            scale = torch.tanh(scale)
            z = torch.cat([moved * torch.exp(scale) + shift, kept], dim=-1)
            log_det = log_det + scale.sum(-1)
        return z, log_det - 0.5 * (z * z + math.log(2 * math.pi)).sum(-1)
