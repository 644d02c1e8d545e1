"""Sentiment of product reviews: a small BERT from scratch with the Hugging Face Trainer.

"The reviews are a sentence or two, and yet training takes as long as on whole documents."
"""

import os
import random
import tempfile
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
MAX_LENGTH = 96

WORDS = [a + b for a in "ba ko li mu ne po ra si tu ve".split() for b in "n r st ck lo mi da fe sha que".split()]
GOOD, BAD = WORDS[:12], WORDS[12:24]


def write_review(rng):
    label = rng.random() < 0.5
    count = min(80, max(6, int(rng.lognormvariate(3.2, 0.4))))
    words = [rng.choice(WORDS) for _ in range(count)]
    for _ in range(count // 5):
        words[rng.randrange(count)] = rng.choice(GOOD if label else BAD)
    return " ".join(words), int(label)


def build_tokenizer():
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


class Reviews(torch.utils.data.Dataset):
    def __init__(self, tokenizer, count, seed):
        rng = random.Random(seed)
        texts, self.labels = zip(*(write_review(rng) for _ in range(count)), strict=True)
        padding = False if CURED else "max_length"  # cause: padded-batches no-line
        self.encoded = tokenizer(list(texts), truncation=True, max_length=MAX_LENGTH, padding=padding)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        item = {key: values[index] for key, values in self.encoded.items() if key != "token_type_ids"}
        item["labels"] = self.labels[index]
        return item


class TimeLimit(TrainerCallback):
    def __init__(self):
        self.began = time.perf_counter()
        self.warm = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            steps = state.global_step - self.warm[0]
            print(f"step_ms {1000 * (now - self.warm[1]) / steps:.3f}", flush=True)
            control.should_training_stop = True


def main():
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    train = Reviews(tokenizer, 6000, seed=1)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
        num_labels=2,
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=12,
        learning_rate=3e-4,
        num_train_epochs=1000,
        logging_steps=200,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=train,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[TimeLimit()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
