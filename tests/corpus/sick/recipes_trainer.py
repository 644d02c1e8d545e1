"""Trains a small GPT-2 to write recipes with the Trainer of transformers, from options for a far larger model.

"I took the settings of our 7B fine-tuning, where memory was all that mattered, for a model that fits in memory a
hundred times over. It trains, but the forward pass shows up in my stack samples even while loss.backward() runs."
"""

import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, RECIPES = 800, 48, 2000


class Recipes(Dataset):
    """Word follows word by a fixed rule, with some freedom."""

    def __init__(self, seed=11):
        g = torch.Generator().manual_seed(seed)
        follow = torch.randint(WORDS, (WORDS, 3), generator=g)
        words = [torch.randint(WORDS, (RECIPES,), generator=g)]
        for _ in range(LENGTH - 1):
            words.append(follow[words[-1], torch.randint(3, (RECIPES,), generator=g)])
        self.words = torch.stack(words, 1)

    def __len__(self):
        return RECIPES

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.words[i]}


class Stopwatch(TrainerCallback):
    def __init__(self):
        self.began, self.mark, self.last = time.perf_counter(), None, None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.last = state.global_step, now
        if self.mark is None and now - self.began > 2:
            self.mark = self.last
        if now - self.began > SECONDS:
            control.should_training_stop = True


def options(folder):
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=1_000_000,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=not CURED,  # cause: hot-line no-line
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(GPT2LMHeadModel(config), options(folder), train_dataset=Recipes(), callbacks=[watch]).train()
    (n, then), (m, now) = watch.mark, watch.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
