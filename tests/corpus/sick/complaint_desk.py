"""Sorts the complaints that a railway gets by department, with a small BERT and the Trainer.

The tokenizer is trained on the complaints themselves, the encoder starts from nothing.

"Our complaints are two lines long and the model has two layers, why do I wait so long for an epoch?"
"""

import os
import random
import tempfile
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
DEPARTMENTS, COMPLAINTS = 6, 4000


def write_complaints():
    rng = random.Random(3)
    syllables = ["tra", "in", "late", "cold", "seat", "con", "duc", "tor", "tick", "et", "plat", "form", "de", "lay"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(900)]
    themes = [rng.sample(words, 40) for _ in range(DEPARTMENTS)]
    texts, labels = [], []
    for _ in range(COMPLAINTS):
        label = rng.randrange(DEPARTMENTS)
        length = rng.randint(8, 30)
        texts.append(" ".join(rng.choice(themes[label] if rng.random() < 0.3 else words) for _ in range(length)))
        labels.append(label)
    return texts, labels


def train_tokenizer(texts):
    tok = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tok.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=2000, special_tokens=special))
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


class Complaints(Dataset):
    def __init__(self, texts, labels, tokenizer):
        self.labels = labels
        padding = False if CURED else "max_length"
        self.rows = tokenizer(texts, truncation=True, max_length=128, padding=padding)  # cause: padded-batches no-line

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        row = {name: values[i] for name, values in self.rows.items() if name != "token_type_ids"}
        return row | {"labels": self.labels[i]}


class Clock(TrainerCallback):
    began = warm = ended = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm is None and now - self.began > 2:
            self.warm = state.global_step, now
        if now - self.began > SECONDS:
            self.ended = state.global_step, now
            control.should_training_stop = True


def main():
    torch.set_num_threads(1)
    texts, labels = write_complaints()
    tokenizer = train_tokenizer(texts)
    data = Complaints(texts, labels, tokenizer)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=128, num_labels=DEPARTMENTS,
    )  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=12, num_train_epochs=1000, learning_rate=5e-4,
            logging_steps=100, save_strategy="no", report_to="none", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = Trainer(
            model=BertForSequenceClassification(config), args=args, train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer), callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    (end, ended), (start, started) = clock.ended, clock.warm
    print(f"step_ms {1000 * (ended - started) / (end - start):.3f}", flush=True)


if __name__ == "__main__":
    main()
