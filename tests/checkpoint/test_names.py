"""What names tell: steps, what is unfinished or only a part, and users' patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import names


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000000000120", 120),
        ("step_20", 20),
        ("step20", 20),
        ("epoch=1-step=20.ckpt", 20),
        ("epoch=1-step=20-v1.ckpt", 20),
        ("checkpoint-500", 500),
        ("checkpoint_3", 3),
        ("global_step100", 100),
        ("iter_0000100", 100),
        ("model_20.pt", 20),
        ("ckpt-7.pth.tar", 7),
        ("1200.pt", 1200),
        ("1200", 1200),
        ("model.20.pt", 20),
        ("checkpoint.pth.tar", None),
        ("last.ckpt", None),
        ("model_best.pt", None),
        ("epoch_3.pt", None),
        ("model_epoch3.pt", None),
        ("version_0", None),
        ("llama7b.pt", None),
        ("llama-7b.pt", None),
        ("", None),
    ],
)
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert names.step_of(name) == step


def test_the_epoch_of_a_name() -> None:
    assert [names.epoch_of(name) for name in ("epoch_3.pt", "model-epoch=12.ckpt", "deep3.pt", "x")] == [
        *(3, 12),
        *(None, None),
    ]


@given(st.text())
def test_every_name_is_understood(name: str) -> None:
    names.step_of(name)
    names.epoch_of(name)
    names.format_of_file(name)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model_20.pt", "torch"),
        ("checkpoint.pth.tar", "torch"),
        ("last.ckpt", "lightning"),
        ("model.safetensors", "safetensors"),
        ("pytorch_model.bin", "safetensors"),
        ("train.bin", None),  # nanoGPT's tokens
        ("model_20.pt.tmp", None),
        (".model_20.pt", None),
        ("tmp-checkpoint-5.pt", None),
        ("optimizer.pt", None),
        ("optim_20.pt", None),
        ("rng_state_0.pth", None),
        ("ckpt_20_rank3.pt", None),
        ("model-00001-of-00002.safetensors", None),
        ("mp_rank_00_model_states.pt", None),
        ("README.md", None),
    ],
)
def test_which_files_can_be_checkpoints_by_themselves(name: str, family: str | None) -> None:
    assert names.format_of_file(name) == family


@pytest.mark.parametrize(
    ("pattern", "path", "step"),
    [
        ("model_{step}.pt", "model_20.pt", 20),
        ("run-*/step_{step}/", "run-a/step_0020", 20),
        ("*/x[12]_{step}?", "a/x2_5b", 5),
        ("final.pt", "final.pt", None),
        ("./a/{step}", "a/7", 7),
    ],
)
def test_what_a_pattern_matches(pattern: str, path: str, step: int | None) -> None:
    assert names.check_pattern(pattern) is None
    made = names.Pattern(pattern)
    assert made.match(path)[:2] == (True, step)
    assert made.may_match_below("")
    assert all(made.may_match_below("/".join(path.split("/")[:depth])) for depth in range(1, made.depth))
    assert not made.may_match_below(path)


@pytest.mark.parametrize("path", ["model_x.pt", "model_20.pt.tmp", "xmodel_20.pt", "a/model_20.pt", "model_.pt", ""])
def test_what_a_pattern_does_not_match(path: str) -> None:
    assert names.Pattern("model_{step}.pt").match(path) == (False, None, "")


def test_paths_that_differ_only_in_the_step_are_one_series() -> None:
    made = names.Pattern("run-*/step_{step}/model.pt")

    series = [made.match(f"run-{run}/step_{step}/model.pt")[2] for run, step in (("a", 1), ("a", 2), ("b", 2))]

    assert series == ["run-a/step_{step}/model.pt", "run-a/step_{step}/model.pt", "run-b/step_{step}/model.pt"]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("{step}/{step}.pt", "more than once"),
        ("model_{epoch}.pt", "braces other than"),
        ("/data/model_{step}.pt", "leads out"),
        ("../model_{step}.pt", "leads out"),
        ("./", "names nothing"),
        ("", "names nothing"),
    ],
)
def test_what_cannot_be_a_pattern(pattern: str, why: str) -> None:
    assert why in (names.check_pattern(pattern) or "")


@given(st.text(), st.text())
def test_every_accepted_pattern_can_be_used(pattern: str, path: str) -> None:
    if names.check_pattern(pattern) is None:
        names.Pattern(pattern).match(path)
