"""Vision transformers: ViT, a Swin-like, a CLIP-like, a DETR-like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Block, Mlp, join_heads, split_heads
from .base import integers, normal, register


class PatchTower(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks; gives the class token."""

    def __init__(self, width: int = 16, size: int = 16, patch: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.norm(self.blocks(self.dropout(x)))[:, 0]


@register("vit", normal(3, 16, 16), dropout=True, fast=True)
def vit() -> nn.Module:
    return nn.Sequential(PatchTower(), nn.Linear(16, 10))


class WindowBlock(nn.Module):
    """Attention inside (shifted) windows with a relative position bias, then an MLP."""

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.window, self.shift = heads, size, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(width, 2 * width)
        self.bias_table = nn.Parameter(0.1 * torch.randn((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None, :]) + window - 1
        self.register_buffer("bias_index", offset[0] * (2 * window - 1) + offset[1])
        self.register_buffer("mask", self._shift_mask() if shift else None)

    def _shift_mask(self) -> Tensor:
        """-100 between positions that the roll brought together from opposite borders."""
        region = torch.zeros(1, self.size, self.size, 1)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((r, c) for r in cuts for c in cuts):
            region[:, rows, columns] = number
        region = self.windows(region).squeeze(-1)
        return (region[:, None, :] != region[:, :, None]).float() * -100.0

    def windows(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        x = x.view(n, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def unwindow(self, x: Tensor) -> Tensor:
        side, c = self.size // self.window, x.shape[-1]
        x = x.view(-1, side, side, self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.size, self.size, c)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self.bias_table[self.bias_index.flatten()].view(*self.bias_index.shape, -1)
        logits = logits + bias.permute(2, 0, 1)
        if self.mask is not None:
            count, t, _ = self.mask.shape
            logits = logits.view(-1, count, self.heads, t, t) + self.mask[:, None]
            logits = logits.view(-1, self.heads, t, t)
        return self.out(join_heads(torch.softmax(logits, dim=-1) @ v))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), dims=(1, 2))
        y = self.unwindow(self.attend(self.windows(y)))
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


@register("swin", normal(3, 16, 16))
class Swin(nn.Module):
    """Two windowed blocks, patch merging, a third block, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.stage1 = nn.Sequential(WindowBlock(8, 2, 8, 4, 0), WindowBlock(8, 2, 8, 4, 2))
        self.merge_norm, self.merge = nn.LayerNorm(32), nn.Linear(32, 12, bias=False)
        self.stage2 = WindowBlock(12, 3, 4, 4, 0)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stage1(self.patch(image).permute(0, 2, 3, 1))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.stage2(self.merge(self.merge_norm(torch.cat(corners, dim=-1))))
        return self.head(self.norm(x).mean(dim=(1, 2)))


@register("clip", normal(3, 16, 16), integers(20, 6, low=1), dropout=True)
class Clip(nn.Module):
    """Image and text towers, unit vectors, learned temperature, both logit matrices."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = PatchTower(width)
        self.token = nn.Embedding(20, width)
        self.position = nn.Parameter(0.1 * torch.randn(6, width))
        self.text = Block(width, 2)
        self.norm = nn.LayerNorm(width)
        self.image_out = nn.Linear(width, 8, bias=False)
        self.text_out = nn.Parameter(width**-0.5 * torch.randn(width, 8))
        self.log_temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.text(self.token(text) + self.position, causal=True))
        rows = torch.arange(text.shape[0])
        text_vector = x[rows, text.argmax(dim=-1)] @ self.text_out
        image_vector = self.image_out(self.image(image))
        image_vector = image_vector / image_vector.norm(dim=-1, keepdim=True)
        text_vector = text_vector / text_vector.norm(dim=-1, keepdim=True)
        logits = self.log_temperature.exp() * image_vector @ text_vector.t()
        return logits, logits.t()


@register("detr", normal(3, 16, 16))
class Detr(nn.Module):
    """Image features attended by learned queries, each giving a class and a box."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, width, 1))
        self.rows = nn.Parameter(0.3 * torch.randn(4, width // 2))
        self.columns = nn.Parameter(0.3 * torch.randn(4, width // 2))
        self.encoder = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(3, width))
        self.classes, self.boxes = nn.Linear(width, 5), nn.Linear(width, 4)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(image)
        n, c, h, w = x.shape
        position = torch.cat(
            [
                self.rows[:, None, :].expand(h, w, c // 2),
                self.columns[None].expand(h, w, c // 2),
            ],
            dim=-1,
        )
        memory = self.encoder(x.flatten(2).transpose(1, 2) + position.reshape(1, h * w, c))
        found = self.decoder(self.queries.expand(n, -1, -1), memory)
        return F.log_softmax(self.classes(found), dim=-1), self.boxes(found).sigmoid()
