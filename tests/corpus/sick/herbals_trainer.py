"""Pretrains a small BERT on old herbals with the Trainer of transformers; whole words are masked, anew in each epoch.

"Masking must not be done once and for all, so it is in the collator. I expected more rows a second."
"""

import os
import random
import tempfile
import time

import torch
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SPECIAL = {
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
}
FIRST, PIECES = len(SPECIAL), 400


def make_tokenizer():
    names = [*SPECIAL.values()] + [("##" if n % 3 == 0 else "") + f"p{n}" for n in range(PIECES)]
    vocabulary = {name: number for number, name in enumerate(names)}
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **SPECIAL)


class Herbals(Dataset):
    def __init__(self, tokenizer, count=3000, length=94):
        g = torch.Generator().manual_seed(1)
        start = torch.randint(0, PIECES, (count, 1), generator=g)
        pace = torch.randint(1, 7, (count, 1), generator=g)
        pieces = FIRST + (start + pace * torch.arange(length)) % PIECES
        begin, end = (torch.full((count, 1), n) for n in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        self.rows = torch.cat([begin, pieces, end], 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


class WholeWords:
    """15 % of the words; of their pieces, 80 % become [MASK], and 10 % any other."""

    def __init__(self, tokenizer, share=0.15):
        self.tokenizer, self.share = tokenizer, share
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.goes_on = torch.tensor([piece.startswith("##") for piece in pieces])

    def __call__(self, rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        if CURED:
            ids, labels = self.all_rows(ids)
        else:
            pairs = [self.one_row(row) for row in ids]  # cause: dataloader-too-few-workers or dataloader-slow-transform
            ids, labels = (torch.stack(part) for part in zip(*pairs, strict=True))
        return {"input_ids": ids, "labels": labels}

    def one_row(self, row):
        words = []
        for at in range(len(row)):
            number = row[at].item()
            piece = self.tokenizer.convert_ids_to_tokens(number)
            if piece in (self.tokenizer.cls_token, self.tokenizer.sep_token):
                continue
            if words and piece.startswith("##"):
                words[-1].append(at)
            else:
                words.append([at])
        random.shuffle(words)
        ids, labels = row.clone(), torch.full_like(row, -100)
        for word in words[: max(1, round(len(words) * self.share))]:
            for at in word:
                labels[at] = row[at]
                chance = random.random()
                if chance < 0.8:
                    ids[at] = self.tokenizer.mask_token_id
                elif chance < 0.9:
                    ids[at] = random.randrange(FIRST, FIRST + PIECES)
        return ids, labels

    def all_rows(self, ids):
        word = (~self.goes_on[ids]).cumsum(1)
        chosen = torch.rand(len(ids), ids.shape[1] + 1).gather(1, word) < self.share
        chosen &= ids >= FIRST
        chance = torch.rand(ids.shape)
        changed = torch.where(chance < 0.9, torch.randint(FIRST, FIRST + PIECES, ids.shape), ids)
        changed = torch.where(chance < 0.8, self.tokenizer.mask_token_id, changed)
        return torch.where(chosen, changed, ids), torch.where(chosen, ids, -100)


class Budget(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.warm = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            control.should_training_stop = True
            (step, at), self.warm = self.warm, (0, float("inf"))
            print(f"step_ms {1000 * (now - at) / (state.global_step - step):.3f}", flush=True)
        return control


def main():
    torch.set_num_threads(1)
    set_seed(0)
    config = BertConfig(
        vocab_size=FIRST + PIECES, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=96,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=12, max_steps=1_000_000, learning_rate=5e-4,
        use_cpu=True, save_strategy="no", report_to=[], logging_steps=200, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = make_tokenizer()
    Trainer(
        model=BertForMaskedLM(config), args=args, train_dataset=Herbals(tokenizer), data_collator=WholeWords(tokenizer),
        callbacks=[Budget()],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
