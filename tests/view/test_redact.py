"""Secrets planted in every shape that the output of programs has; and ordinary text that must stay readable."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from runs_on_disk import begin, write

from gpulaunch.exporters.view.load import load_run
from gpulaunch.profiler.redact import redact, redact_all, redact_words

CANARY = "c4n4ry-s3cr3t-v4lue"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN={}",
        "export AWS_SECRET_ACCESS_KEY={}",
        "environ({{'WANDB_API_KEY': '{}', 'HOME': '/home/me'}})",
        '{{"DB_PASSWORD": "{}"}}',
        "PASSWORD = {}",
        "connect(password='{}', user='me')",
        "api_key={}&x=1",
        'client(auth_token = "{}")',
        "my-access-key={}",
        "train.py --hf-token {} --lr 0.1",
        "train.py --hf_token {} --lr 0.1",
        "train.py --hf-token={}",
        "password: {}",
        "Authorization: Bearer {}",
        "git clone https://me:{}@example.org/x.git",
    ],
)
def test_a_secret_is_hidden_wherever_its_name_gives_it_away(text: str) -> None:
    shown = redact(text.format(CANARY))

    assert CANARY not in shown
    assert "<redacted>" in shown


@pytest.mark.parametrize(
    "token",
    [
        "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_0123456789abcdefghij0123456789abcdef",
        "github_pat_11ABCDEFG_abcdefghijkl",
        "glpat-abcdefghijklmnopqrst",
        "sk-proj-abcdefghijklmnopqrstuvwx",
    ],
)
def test_a_well_known_token_is_hidden_by_its_shape(token: str) -> None:
    assert redact(f"401 for ({token}), sorry") == "401 for (<redacted>), sorry"


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'layer.0.weight'",
        "num_tokens=4096, monkey=3, keys: 5",
        "sorted(x, key=lambda pair: pair[1])",
        "hf_hub_download(repo_id='x')",
        "Unexpected token: x",
        "RuntimeError: tokenizer must not be None",
        "https://example.org:8080/path",
        "mask-rcnn",
        "",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_a_whole_document_is_redacted_and_keeps_its_shape() -> None:
    document = {"a": [f"HF_TOKEN={CANARY}", 3, None], "b": {"c": (f"--token {CANARY}", 1.5)}}

    assert redact_all(document) == {"a": ["HF_TOKEN=<redacted>", 3, None], "b": {"c": ["--token <redacted>", 1.5]}}


def test_what_lies_too_deep_to_be_seen_is_hidden() -> None:
    deep: object = f"HF_TOKEN={CANARY}"
    for _ in range(5000):
        deep = [deep]

    assert CANARY not in str(redact_all({"a": deep, "b": 3}))


def test_the_value_of_an_option_is_hidden_as_a_word_of_its_own() -> None:
    words = ["train.py", "--hf-token", CANARY, "--api_key=" + CANARY, "--key-file", "k", "-token", CANARY, "token", "3"]

    assert redact_words(words) == (
        *("train.py", "--hf-token", "<redacted>", "--api_key=<redacted>", "--key-file", "k", "-token", "<redacted>"),
        *("token", "3"),
    )
    assert redact_words(["--password"]) == ("--password",)
    assert redact_words([f"--encryption-key={CANARY}", "--hub.token", CANARY, "--num_tokens=9", "--lr", "1"]) == (
        *("--encryption-key=<redacted>", "--hub.token", "<redacted>", "--num_tokens=9", "--lr", "1"),
    )


def test_a_command_line_that_was_kept_raw_is_shown_without_its_secrets(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    write(tmp_path / "run", "job.json", {"version": 1, "command": ["gpulaunch", "train.py", "--hf-token", CANARY]})

    assert load_run(tmp_path / "run").command == ("gpulaunch", "train.py", "--hf-token", "<redacted>")


@pytest.mark.parametrize(
    "line", ["KEY" * 30_000, "a_" * 50_000, "token " * 20_000, "://" * 30_000, "-" * 100_000, "A=" * 50_000]
)
def test_a_hostile_line_costs_little(line: str) -> None:
    """Linear time: ten times the text may cost a few tens of times as much, and not a hundred."""

    def cost_ns(text: str) -> int:
        runs = []
        for _ in range(3):
            begin_ns = time.thread_time_ns()
            redact(text)
            runs.append(time.thread_time_ns() - begin_ns)
        return min(runs)

    assert cost_ns(line) < 40 * (cost_ns(line[: len(line) // 10]) + 100_000)
