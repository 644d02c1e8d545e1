"""Pretrains a small BERT on verses, a masked language model, with the Trainer of transformers.

"A smaller model does not make it much faster."
"""

import os
import random
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
PAD, CLS, SEP, MASK, FIRST, VOCABULARY = 0, 1, 2, 3, 4, 300


class Verses(Dataset):
    def __init__(self, count=8_000):
        random.seed(0)
        self.verses = []
        for _ in range(count):
            words = [random.randrange(FIRST, VOCABULARY) for _ in range(random.randint(24, 46))]
            self.verses.append(torch.tensor([CLS, *words, SEP]))

    def __len__(self):
        return len(self.verses)

    def __getitem__(self, number):
        return {"input_ids": self.verses[number]}


class MaskingCollator:
    def __init__(self, share=0.15):
        self.share = share

    def mask_verse(self, ids):
        inputs, labels = ids.clone(), torch.full_like(ids, -100)
        for place in range(len(ids)):  # cause: dataloader-too-few-workers or dataloader-slow-transform
            token = ids[place]
            if token in (PAD, CLS, SEP):
                continue
            chance = random.random()
            if chance < self.share:
                labels[place] = token
                chance /= self.share
                if chance < 0.8:
                    inputs[place] = MASK
                elif chance < 0.9:
                    inputs[place] = random.randrange(FIRST, VOCABULARY)
        return inputs, labels

    def mask_all(self, ids):
        inputs, labels = ids.clone(), ids.clone()
        chosen = (torch.rand(ids.shape) < self.share) & (ids >= FIRST)
        labels[~chosen] = -100
        kind = torch.rand(ids.shape)
        inputs[chosen & (kind < 0.8)] = MASK
        other = chosen & (kind >= 0.8) & (kind < 0.9)
        inputs[other] = torch.randint(FIRST, VOCABULARY, ids.shape)[other]
        return inputs, labels

    def __call__(self, rows):
        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PAD)
        if CURED:
            inputs, labels = self.mask_all(ids)
        else:
            pairs = [self.mask_verse(verse) for verse in ids]
            inputs = torch.stack([pair[0] for pair in pairs])
            labels = torch.stack([pair[1] for pair in pairs])
        return {"input_ids": inputs, "attention_mask": (ids != PAD).long(), "labels": labels}


class Clock(TrainerCallback):
    began = warm = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            self.ended = state.global_step, now


def main():
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=64,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1_000_000, per_device_train_batch_size=32, learning_rate=5e-4,
        logging_steps=200, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(
        model=BertForMaskedLM(config), args=args, train_dataset=Verses(), data_collator=MaskingCollator(),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
