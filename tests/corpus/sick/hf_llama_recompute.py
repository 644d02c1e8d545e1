"""Trains a tiny Llama on arithmetic strings with the transformers Trainer.

Arguments were taken over from the script for the 7B fine-tuning.

"The backward pass takes over three times as long as the forward pass; I always read that it should be two.
Memory is no problem at all here, the machine has lots free."
"""

import os
import random
import tempfile
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

CHARS = "0123456789+-*=; "
STOI = {c: i + 1 for i, c in enumerate(CHARS)}
BLOCK = 64


def make_text(n_expr=30_000):
    rnd = random.Random(11)
    parts = []
    for _ in range(n_expr):
        a, b = rnd.randrange(100), rnd.randrange(100)
        op = rnd.choice("+-*")
        r = a + b if op == "+" else a - b if op == "-" else a * b
        parts.append(f"{a}{op}{b}={r};")
    return "".join(parts)


class Blocks(torch.utils.data.Dataset):
    def __init__(self):
        ids = torch.tensor([STOI[c] for c in make_text()])
        self.ids = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class StopAfter(TrainerCallback):
    def __init__(self, seconds):
        self.seconds = seconds
        self.began = None
        self.warm = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is None:
            self.began = time.time()

    def on_step_end(self, args, state, control, **kwargs):
        elapsed = time.time() - self.began
        if self.warm is None and elapsed >= 2.0:
            self.warm = (elapsed, state.global_step)
        if elapsed >= self.seconds:
            control.should_training_stop = True
            self.mean = (elapsed - self.warm[0]) / (state.global_step - self.warm[1])


if __name__ == "__main__":
    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARS) + 1,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    stop = StopAfter(SECONDS)
    with tempfile.TemporaryDirectory() as tmp:
        targs = TrainingArguments(
            output_dir=tmp,
            use_cpu=True,
            max_steps=10**7,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=100,
            weight_decay=0.1,
            max_grad_norm=1.0,
            gradient_checkpointing=not CURED,  # cause: hot-line no-line
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=targs, train_dataset=Blocks(), callbacks=[stop])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    print(f"step_ms {stop.mean * 1000:.3f}", flush=True)
