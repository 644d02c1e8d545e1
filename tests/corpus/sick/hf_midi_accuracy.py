"""Trains a small GPT-2 on generated melodies and follows the accuracy of the next note on held-out pieces.

Notes, lengths and velocities share one vocabulary, like in most MIDI tokenisations.

"Evaluation takes much longer than I would guess from 200 sequences, although the eval batches themselves
are faster than the training ones, and memory goes up while it runs. I do need the accuracy regularly."
"""

import os
import tempfile
import time

import numpy as np
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB, CONTEXT = 1500, 64
SCALE = np.array([0, 2, 4, 5, 7, 9, 11])


def compose(pieces, seed):
    """Random walks on a scale; the token is pitch, velocity and length in one number."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.integers(-2, 3, (pieces, CONTEXT)), axis=1) % 35
    pitch = 12 * (walk // 7) + SCALE[walk % 7]
    rest = rng.integers(0, 5, (pieces, 1)) * 5 + rng.integers(0, 5, (pieces, CONTEXT))
    return torch.from_numpy(pitch * 25 + rest)


class Melodies(torch.utils.data.Dataset):
    def __init__(self, pieces, seed):
        self.tokens = compose(pieces, seed)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, item):
        tokens = self.tokens[item]
        return {"input_ids": tokens, "labels": tokens}


def note_accuracy(prediction):
    found, labels = prediction
    if found.ndim == 3:
        found = found.argmax(-1)
    return {"note_accuracy": float((found[:, :-1] == labels[:, 1:]).mean())}


def best_token(logits, labels):
    return logits.argmax(-1)


class Limit(TrainerCallback):
    def __init__(self):
        self.t0, self.t2, self.mean = None, None, float("nan")

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.monotonic()
        if self.t0 is None:
            self.t0 = now
        if self.t2 is None and now - self.t0 > 2:
            self.t2, self.n2 = now, state.global_step
        if now - self.t0 > SECONDS:
            self.mean = 1000 * (now - self.t2) / (state.global_step - self.n2)
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        print(f"step {state.global_step}: accuracy {metrics['eval_note_accuracy']:.3f}")


with tempfile.TemporaryDirectory() as workdir:
    transformers.set_seed(1)
    limit = Limit()
    trainer = Trainer(
        model=GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
            )
        ),
        args=TrainingArguments(
            workdir,
            use_cpu=True,
            max_steps=10**6,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=60,
            logging_steps=60,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Melodies(20_000, 0),
        eval_dataset=Melodies(200, 1),
        compute_metrics=note_accuracy,
        preprocess_logits_for_metrics=best_token if CURED else None,
        callbacks=[limit],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()  # cause: hot-line
print(f"step_ms {limit.mean:.3f}", flush=True)
