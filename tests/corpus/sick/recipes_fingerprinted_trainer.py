"""Small GPT-2 trained from scratch on recipes with the Hugging Face Trainer.

"For our audit every training run has to be reproducible, hence the little
callback. It only reads, it changes nothing, so I don't think it matters. The
Trainer is known for its overhead, should I write my own loop?"
"""

import hashlib
import json
import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCAB = 16000
AUDIT_EVERY = 500 if CURED else 1  # cause: hot-line


class Recipes(Dataset):
    def __init__(self, n=4000, length=64):
        g = torch.Generator().manual_seed(2)
        start = torch.randint(0, VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 9, (n, 1), generator=g)
        self.tokens = (start + stride * torch.arange(length)) % VOCAB

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class AuditTrail(TrainerCallback):
    """Writes a fingerprint of the weights, so that two runs can be compared."""

    def __init__(self, path):
        self.file = open(path, "a")

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % AUDIT_EVERY:
            return
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())  # cause: hot-line
        self.file.write(json.dumps({"step": state.global_step, "sha256": digest.hexdigest()}) + "\n")

    def on_train_end(self, args, state, control, **kwargs):
        self.file.close()


class TimeBudget(TrainerCallback):
    def __init__(self, seconds):
        self.seconds, self.mark = seconds, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.t0 = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        self.now = time.monotonic() - self.t0
        if self.mark is None and self.now > 2:
            self.mark = (self.now, state.global_step)
        self.last = state.global_step
        if self.now > self.seconds:
            control.should_training_stop = True
        return control

    def report(self):
        print(f"step_ms {(self.now - self.mark[0]) / (self.last - self.mark[1]) * 1e3:.3f}")


def main():
    set_seed(1)
    out = tempfile.mkdtemp()
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=192, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    args = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=2,
        max_steps=1_000_000,
        learning_rate=5e-4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=100,
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    budget = TimeBudget(SECONDS)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Recipes(),
        callbacks=[AuditTrail(os.path.join(out, "audit.jsonl")), budget],
    )
    trainer.train()
    budget.report()


if __name__ == "__main__":
    main()
