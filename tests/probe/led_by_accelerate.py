"""Training loops as Accelerate leads them: its dataloaders read a batch ahead, its optimizers step when they may. As a
script, on as many ranks as it is started on."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from diary import BATCH, Data, Diary
from led_by_hand import BALLAST, EVERY
from torch import nn
from torch.utils.data import DataLoader
from toy_model import LOSS, a_model


def whole(diary: Diary, backend: str, directory: str, every: int = EVERY, ballast: bool = True) -> dict[str, Any]:
    """Three epochs of two steps; evaluated first and after each step, saved after each second."""
    dynamo = TorchDynamoPlugin(backend=DynamoBackend(backend.upper()), fullgraph=True) if backend else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every, dynamo_plugin=dynamo)
    model = a_model()
    if ballast:
        model.register_buffer("ballast", BALLAST)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    train_loader: Any = DataLoader(Data(diary, "train"), batch_size=BATCH)
    eval_loader: Any = DataLoader(Data(diary, "eval"), batch_size=BATCH)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    losses = []
    steps = 0

    def evaluate() -> None:
        with diary.during("evaluation"):
            for batch in eval_loader:
                with torch.no_grad():
                    losses.append(LOSS(model(batch["inputs"]), batch["labels"]).item())

    evaluate()
    for _ in range(3):
        for batch in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(LOSS(model(batch["inputs"]), batch["labels"]))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                evaluate()
                if steps % 2 == 0:
                    with diary.during("save"):
                        accelerator.save_state(os.path.join(directory, f"saved-{steps}"))
    return {"steps": steps, "losses": losses, "ranks": accelerator.num_processes}


def scaled(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps, five of which the gradient scaler leaves out: the first three, as it does until its scale is right."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # what it makes for 16 bits on a GPU
    model, optimizer, loader = accelerator.prepare(
        model := a_model(), torch.optim.AdamW(model.parameters()), DataLoader(Data(diary, "train"), batch_size=BATCH)
    )
    skipped = 0
    for index, batch in enumerate(loader):
        loss = LOSS(model(batch["inputs"]), batch["labels"])
        accelerator.backward(loss * float("inf") if index in (0, 1, 2, 6, 7) else loss)
        optimizer.step()
        skipped += optimizer.step_was_skipped
        optimizer.zero_grad()
    return {"steps": 12, "skipped": skipped}


def two_optimizers(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps of two optimizers, as of a GAN."""
    accelerator = Accelerator(cpu=True)
    generator, critic = a_model(), nn.Linear(3, 1)
    generator, critic, fools, judges, loader = accelerator.prepare(
        generator,
        critic,
        torch.optim.Adam(generator.parameters()),
        torch.optim.Adam(critic.parameters()),
        DataLoader(Data(diary, "train"), batch_size=BATCH),
    )
    for batch in loader:
        judges.zero_grad()
        accelerator.backward(critic(generator(batch["inputs"]).detach()).mean())
        judges.step()
        fools.zero_grad()
        accelerator.backward(-critic(generator(batch["inputs"])).mean())
        fools.step()
    return {"steps": diary.optimizer_steps}


def closures(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps of an optimizer that evaluates as often as it likes."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model := a_model(),
        torch.optim.LBFGS(model.parameters(), max_iter=3),
        DataLoader(Data(diary, "train"), batch_size=BATCH),
    )
    evaluated = 0
    for batch in loader:

        def closure(batch: Any = batch) -> torch.Tensor:
            nonlocal evaluated
            evaluated += 1
            optimizer.zero_grad()
            loss = LOSS(model(batch["inputs"]), batch["labels"])
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return {"steps": diary.optimizer_steps, "evaluated": evaluated}


if __name__ == "__main__":
    from leaders import as_a_script

    as_a_script(lambda diary: whole(diary, "", os.getcwd(), every=4, ballast=False))
