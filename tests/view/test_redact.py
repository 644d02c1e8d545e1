"""Secrets planted in every shape that the output of programs has; and ordinary text that must stay readable."""

from __future__ import annotations

import string
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_on_disk import begin, write

from gpulaunch.exporters.view.load import load_run
from gpulaunch.profiler.redact import is_secret, redact, redact_all, redact_words

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
        "redis://:{}@cache:6379/0",
        "postgres://me:p@{}@db/x",
        "Authorization: Basic {}",
        '{{"authorization": "{}"}}',
        "DB_PASS={}",
        "environ({{'WANDB_AUTH': '{}'}})",
        "GIT_PAT_CI={}",
        "AWS_CREDENTIALS: {}",
        "train.py --auth {} --lr 0.1",
        "train.py --db-pass={}",
        "git clone https://{}@example.org/x.git",
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
        "xoxb-123456789012-abcdefghijkl",
        "AIza0123456789abcdefghijklmnopqrstuvwxy",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefgh",
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
        "/data/hf_checkpoints/sk-learn-pipeline/step_100",
        "ssh://git@github.com/me/x.git",
        "me@host:/data/x",
        "PATH=/usr/bin LD_LIBRARY_PATH=/lib AUTHOR=me GIT_AUTHOR_NAME=me NUM_PASSES=3 COMPAT=1 PATTERN=x",
        "--path x --author me --passes 3 --pattern y --compat z --bypass w --compass v",
        "PASS: 3 tests, FAIL: 0; backward pass: 3 ms; pass=2",
        "https://deploy-bot@example.org/x.git",
        "commit 28c6cf20d7b3f8a1c5e9024b6d7f8a9b0c1d2e3f",
        "meta-llama/Llama-3.1-8B-Instruct",
        "registry/image:tag@sha256:0123456789abcdef",
        "http://host:8080/a?mail=me@example.org",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


_ALNUM = string.ascii_letters + string.digits
_SECRETS = st.one_of(
    *(
        st.builds(str.format, st.just(shape), st.text(alphabet, min_size=size, max_size=size))
        for shape, alphabet, size in (
            ("ghp_{}", _ALNUM, 36),
            ("gho_{}", _ALNUM, 36),
            ("github_pat_{}", _ALNUM, 40),
            ("glpat-{}", _ALNUM, 20),
            ("hf_{}", _ALNUM, 34),
            ("AKIA{}", string.ascii_uppercase + string.digits, 16),
            ("ASIA{}", string.ascii_uppercase + string.digits, 16),
            ("xoxb-{}", _ALNUM, 24),
            ("sk-{}", _ALNUM, 48),
        )
    )
)


@given(st.text(max_size=40), _SECRETS, st.text(max_size=40), st.sampled_from([" ", "\n", '"', "'", "=", "/", ":", ","]))
def test_a_token_inside_any_text_never_comes_out(before: str, secret: str, after: str, edge: str) -> None:
    assert secret not in redact(before + edge + secret + edge + after)


@given(
    st.sampled_from(["https", "postgresql+psycopg", "s3", "redis"]),
    st.text(_ALNUM + "._-", max_size=12),
    st.text(_ALNUM + "!$%&()*+-.;=@^_~", min_size=6, max_size=30),
    st.sampled_from(["example.org", "db:5432", "[::1]:80"]),
)
def test_the_password_of_a_url_never_comes_out(scheme: str, user: str, password: str, host: str) -> None:
    shown = redact(f"see {scheme}://{user}:{password}@{host}/path")

    assert f":{password}@" not in shown
    assert "<redacted>" in shown
    assert shown.endswith("/path")


@given(
    st.lists(st.sampled_from(["model", "ckpt", "step_100", "a1b2c3d4e5f6", "v1.2", "8B", "run-7", "bf16"]), min_size=1)
)
def test_redacting_twice_changes_nothing_more(words: list[str]) -> None:
    text = redact(f"{words[0]} HF_TOKEN='x' --api_key=y --token '<redacted>' " + " ".join(words))

    assert redact(text) == text


@given(
    st.lists(st.sampled_from(["model", "ckpt", "step_100", "a1b2c3d4e5f6", "v1.2", "8B", "run-7", "bf16"]), min_size=1)
)
def test_paths_and_names_come_out_as_they_are(words: list[str]) -> None:
    for joint in ("/", "-", "_", ".", " "):
        assert redact(joint.join(words)) == joint.join(words)


def test_a_private_key_is_hidden_and_the_text_around_it_stays() -> None:
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabc\n-----END RSA PRIVATE KEY-----"

    assert redact(f"key:\n{pem}\nend") == (
        "key:\n-----BEGIN RSA PRIVATE KEY-----<redacted>-----END RSA PRIVATE KEY-----\nend"
    )
    assert "MIIE" not in redact(pem[:45]), "cut off"


def test_an_aws_secret_beside_its_id_is_hidden() -> None:
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"

    assert redact(f"AKIAIOSFODNN7EXAMPLE:{secret}") == "<redacted>:<redacted>"


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


def test_the_names_of_variables_are_secret_by_whole_words() -> None:
    assert all(
        map(is_secret, ("DB_PASS", "WANDB_AUTH", "auth", "GIT_PAT", "AWS_CREDENTIAL_FILE", "HF_TOKEN", "API_KEY"))
    )
    assert not any(map(is_secret, ("PATH", "PYTHONPATH", "AUTHOR", "GIT_AUTHOR_NAME", "PASSES", "PATTERN", "COMPAT")))


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
