"""A training loop that is written out."""

from __future__ import annotations

import os
from typing import Any

import torch
from diary import BATCH, Data, Diary
from torch.utils.data import DataLoader, TensorDataset
from toy_model import DATA, LOSS, a_model

from gpulaunch.profiler.probe.inject import current

BALLAST = torch.zeros(8 << 20)
"""32 MB in a checkpoint: writing them takes longer than all that is done around it."""

EVERY = 8
"""Micro-steps in a step; the last step of an epoch of 12 has 4."""


def whole(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """Three epochs of two steps; evaluated first and after each step, saved after each second."""
    train_loader = DataLoader(Data(diary, "train"), batch_size=BATCH)
    eval_loader = DataLoader(Data(diary, "eval"), batch_size=BATCH)
    model = a_model()
    forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    steps = 0

    def evaluate() -> None:
        with diary.during("evaluation"):
            for batch in eval_loader:
                with torch.no_grad():
                    losses.append(LOSS(forward(batch["inputs"]), batch["labels"]).item())

    evaluate()
    for _ in range(3):
        for index, batch in enumerate(train_loader, 1):
            (LOSS(forward(batch["inputs"]), batch["labels"]) / EVERY).backward()
            if index % EVERY == 0 or index == len(train_loader):
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                evaluate()
                if steps % 2 == 0:
                    with diary.during("save"):
                        torch.save([model.state_dict(), BALLAST], os.path.join(directory, f"saved-{steps}.pt"))
    return {"steps": steps, "losses": losses}


def many_steps(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """640 steps that take hardly any time, evaluated after each fifth; one of four blocks of them is observed."""
    probe = current()
    assert probe is not None
    probe.unobserved.observe_one_of(4)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(640 * BATCH, 8), torch.randint(0, 3, (640 * BATCH,)))
    train_loader = DataLoader(data, batch_size=BATCH)
    eval_loader = DataLoader(DATA, batch_size=2 * BATCH)
    evaluated = 0
    for inputs, targets in train_loader:
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        if diary.optimizer_steps % 5 == 0:
            for some, _ in eval_loader:
                evaluated += 1
                with torch.no_grad():
                    model(some)
    return {"steps": diary.optimizer_steps, "evaluated": evaluated}
