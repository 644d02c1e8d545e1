"""What the programs of `ranks` train: a small model, and data that it can learn nothing from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

DATA = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
LOSS = nn.CrossEntropyLoss()


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: nn.Module, loader: Any, optimizer: Any = None, epochs: int = 1) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = LOSS(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
