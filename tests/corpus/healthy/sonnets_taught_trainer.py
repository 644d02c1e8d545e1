"""Teaches a small GPT-2 by a larger one with the Trainer, on lines that are made as it goes, none of them seen twice.

"A second network, larger than the one I train, runs in every step, and my loader has no workers at all."
"""

import os
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
LETTERS, WORD, WORDS, BATCH, HEAT = 96, 8, 8, 6, 2.0


class Lines(IterableDataset):
    """Lines of eight words out of a vocabulary in which words follow one another by a rule, made 512 at a time."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.vocabulary = torch.randint(LETTERS, (400, WORD), generator=torch.Generator().manual_seed(0))

    def __iter__(self):
        hops = torch.arange(WORDS) * 37
        while True:
            first = torch.randint(400, (512, 1), generator=self.gen)
            strays = torch.randint(2, (512, WORDS), generator=self.gen)
            yield from self.vocabulary[(first + hops + strays) % 400].flatten(1).unbind()


class Taught(Trainer):
    teacher = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        text = inputs["input_ids"]
        with torch.no_grad():
            wished = F.log_softmax(self.teacher(input_ids=text).logits / HEAT, dim=-1)
        logits = model(input_ids=text).logits
        told = F.kl_div(F.log_softmax(logits / HEAT, -1), wished, reduction="sum", log_target=True) / text.numel()
        seen = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        loss = seen + HEAT * HEAT * told
        return (loss, {"logits": logits}) if return_outputs else loss


class Clock(TrainerCallback):
    began = warm = ended = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            self.ended = state.global_step, now


def gpt(width, layers):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=LETTERS, n_positions=WORD * WORDS, n_embd=width, n_layer=layers, n_head=4, use_cache=False,
            activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=BATCH, learning_rate=5e-4,
        logging_steps=50, save_strategy="no", eval_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        max_grad_norm=1.0,
    )  # fmt: skip
    clock = Clock()
    trainer = Taught(
        model=gpt(128, 3), args=args, train_dataset=Lines(1), callbacks=[clock],
        data_collator=lambda rows: {"input_ids": torch.stack(rows)},
    )  # fmt: skip
    trainer.teacher = gpt(160, 4).eval().requires_grad_(False)
    trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
