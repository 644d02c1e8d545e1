"""Training loops as Lightning leads them; as a script, with DDP on two ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from diary import BATCH, Data, Diary
from led_by_hand import BALLAST, EVERY
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from toy_model import LOSS, a_model


class Module(lightning.LightningModule):
    """A model that steps by itself."""

    def __init__(self, ballast: bool = False) -> None:
        super().__init__()
        self.layers = a_model()
        self.losses: list[torch.Tensor] = []
        if ballast:
            self.register_buffer("ballast", BALLAST)

    def training_step(self, batch: Any, index: int) -> Any:
        return LOSS(self.layers(batch["inputs"]), batch["labels"])

    def validation_step(self, batch: Any, index: int) -> Any:
        return self.training_step(batch, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Noting(Callback):
    """Notes the losses, and when it evaluates."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._during: Any = None
        self.losses: list[float] = []

    def on_validation_start(self, *_: Any) -> None:
        self._during = self._diary.during("evaluation")
        self._during.__enter__()

    def on_validation_end(self, *_: Any) -> None:
        self._during.__exit__(None, None, None)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"].item())


def fit(diary: Diary, module: Any, *callbacks: Any, **arguments: Any) -> Any:
    """Let it train."""

    class Saving(lightning.Trainer):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with diary.during("save"):
                super().save_checkpoint(*args, **kwargs)

    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Saving(callbacks=list(callbacks), **(settings | arguments))
    train_loader = DataLoader(Data(diary, "train"), batch_size=BATCH)
    eval_loader = DataLoader(Data(diary, "eval"), batch_size=BATCH)
    trainer.fit(module, train_loader, eval_loader)
    return trainer


def whole(diary: Diary, backend: str, directory: str, every: int = EVERY, ranks: int = 1) -> dict[str, Any]:
    """Three epochs of two steps; evaluated first and three times an epoch, in the midst of a step too, and saved after
    each second step."""
    module: Any = Module(ballast=ranks == 1)
    noting = Noting(diary)
    trainer = fit(
        diary,
        torch.compile(module, backend=backend) if backend else module,
        noting,
        ModelCheckpoint(directory, save_top_k=-1, every_n_train_steps=2),
        max_epochs=3,
        accumulate_grad_batches=every,
        val_check_interval=every // 2,
        enable_checkpointing=True,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
    )
    told = {"steps": trainer.global_step, "losses": noting.losses, "ranks": trainer.world_size}
    if ranks == 1:
        return told
    environment, launcher = trainer.strategy.cluster_environment, trainer.strategy.launcher
    return told | {"environment": type(environment).__name__, "started": len(launcher.procs)}


def scaled(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps, five of which the gradient scaler leaves out: the first three, as it does until its scale is right."""

    class Overflowing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss * float("inf") if index in (0, 1, 2, 6, 7) else loss

    precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    trainer = fit(diary, Overflowing(), plugins=[precision])
    return {"steps": trainer.global_step, "skipped": trainer.global_step - diary.optimizer_steps}


def two_optimizers(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps of two optimizers, as of a GAN, by hand."""

    class Gan(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Linear(3, 1)

        def training_step(self, batch: Any, index: int) -> None:
            judges, fools = self.optimizers()
            judges.zero_grad()
            self.manual_backward(self.critic(self.layers(batch["inputs"]).detach()).mean())
            judges.step()
            fools.zero_grad()
            self.manual_backward(-self.critic(self.layers(batch["inputs"])).mean())
            fools.step()

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters()) for part in (self.critic, self.layers)]

    trainer = fit(diary, Gan())
    return {"steps": trainer.global_step}  # each optimizer's


def closures(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps of an optimizer that evaluates as often as it likes."""

    class Evaluating(Module):
        evaluated = 0

        def training_step(self, batch: Any, index: int) -> Any:
            self.evaluated += 1
            return super().training_step(batch, index)

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    module = Evaluating()
    return {"steps": fit(diary, module).global_step, "evaluated": module.evaluated}


def no_optimizer(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """12 steps whose parameters are updated by hand."""

    class ByHand(Module):
        def on_after_backward(self) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

        def configure_optimizers(self) -> None:
            return None

    return {"steps": fit(diary, ByHand()).global_step}


if __name__ == "__main__":
    from leaders import as_a_script

    as_a_script(lambda diary: whole(diary, "", os.getcwd(), every=4, ranks=2))
