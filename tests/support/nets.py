"""Models as people train them, small: with BatchNorm in the places where it is found. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A residual block; its BatchNorm layers are in a list beside their names, as some code holds them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = nn.Identity() if before == after else nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))
        self.used = [self.norms[0], self.norms[1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.used[0](self.first(x)).relu()
        z: torch.Tensor = self.used[1](self.second(y)) + self.short(x)
        return z.relu()


class ResNet(nn.Module):
    """Images (N, 3, H, W) to `classes` values."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width), Block(width, 2 * width))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)))


class Language(nn.Module):
    """A transformer over tokens (N, L) whose output layer is its embedding; BatchNorm over channels after the embedding, as (N, C, L)."""

    def __init__(self, tokens: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.norm = nn.BatchNorm1d(width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.output(self.layer(x, src_mask=mask, is_causal=True))


class Recurrent(nn.Module):
    """An LSTM over (N, L, 3), and BatchNorm before the last layer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, width, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.norm(self.lstm(x)[0][:, -1]))


def flow(*, passes: int | None, features: int = 4, context: int = 0) -> Any:
    """A neural spline flow of zuko with BatchNorm between its layers: autoregressive, or with two passes coupling by masks.

    With a context, the masks of a coupling keep that apart from the half that it transforms, so that mixing features is wrong there too.
    """
    import zuko

    def activation() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(16), nn.ReLU())

    return zuko.flows.NSF(features, context, transforms=2, bins=4, passes=passes, hidden_features=(16, 16), activation=activation)
