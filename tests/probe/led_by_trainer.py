"""A transformer as the Hugging Face Trainer leads it; as a script, on as many ranks as it is started on."""

from __future__ import annotations

import os
from typing import Any

import torch
from diary import BATCH, Data, Diary
from led_by_hand import BALLAST, EVERY
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments


class Tokens(Data):
    """Five tokens that stand for nothing."""

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + 5) % 16, "labels": self.labels[index]}


def tiny_model() -> Any:
    """Two dimensions a head, and no download."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 4, "num_hidden_layers": 1}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=16, num_labels=3, pad_token_id=0, **size))


def train(diary: Diary, directory: str, model: Any, **arguments: Any) -> Any:
    """Let it train."""

    class Noting(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with diary.during("evaluation"):
                return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with diary.during("save"):
                super()._save_checkpoint(*args, **kwargs)

    settings: dict[str, Any] = {
        "output_dir": directory,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "num_train_epochs": 3,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
    }
    trainer = Noting(
        model=model,
        args=TrainingArguments(**(settings | arguments)),
        train_dataset=Tokens(diary, "train"),
        eval_dataset=Tokens(diary, "eval"),
    )
    trainer.train()
    return trainer


def whole(diary: Diary, backend: str, directory: str, every: int = EVERY, ballast: bool = True) -> dict[str, Any]:
    """Three epochs of two steps; evaluated first and after each step, saved after each second."""
    model = tiny_model()
    if ballast:
        model.register_buffer("ballast", BALLAST)
    trainer = train(
        diary,
        directory,
        model,
        gradient_accumulation_steps=every,
        logging_steps=1,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        torch_compile_backend=backend or None,
    )
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return {"steps": trainer.state.global_step, "losses": losses, "ranks": trainer.args.world_size}


def many_microsteps(diary: Diary, backend: str, directory: str) -> dict[str, Any]:
    """Three epochs of two steps of 72 and 24 samples, one by one; all batches of a step are read before its first."""
    trainer = train(diary, directory, tiny_model(), gradient_accumulation_steps=72, per_device_train_batch_size=1)
    return {"steps": trainer.state.global_step}


if __name__ == "__main__":
    from leaders import as_a_script

    as_a_script(lambda diary: whole(diary, "", os.getcwd(), every=4, ballast=False))
