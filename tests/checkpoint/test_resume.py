"""How a script is told where to go on from."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint.resume import PRESETS, check_template, resume_args


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("--resume {path}", ["--resume", "/ckpt/run 1/step-20"]),
        ("--resume={path}", ["--resume=/ckpt/run 1/step-20"]),
        ("--load '{dir}' --tag {name}", ["--load", "/ckpt/run 1", "--tag", "step-20"]),
        ("train.resume='a b {path}'", ["train.resume=a b /ckpt/run 1/step-20"]),
        ("transformers", ["--resume_from_checkpoint", "/ckpt/run 1/step-20"]),
        ("lightning", ["--ckpt_path", "/ckpt/run 1/step-20"]),
        ("megatron", ["--load", "/ckpt/run 1", "--ckpt-step", "20"]),
    ],
)
def test_a_template_is_filled_in(template: str, args: list[str]) -> None:
    assert check_template(template) is None
    assert resume_args(template, "/ckpt/run 1/step-20") == args


def test_the_paths_of_remote_and_shallow_checkpoints() -> None:
    assert resume_args("{dir} {name} {step}", "s3://bucket/run/iter_0000100/") == [
        *("s3://bucket/run", "iter_0000100", "100")
    ]
    assert resume_args("{dir} {name}", "/model.pt") == ["/", "model.pt"]


def test_a_step_that_is_asked_for_and_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="'release' contains no step"):
        resume_args("megatron", "/ckpt/release")


@given(st.text().filter(lambda text: "\0" not in text))
def test_whatever_the_path_it_is_one_argument(path: str) -> None:
    assert resume_args("--resume {path} end", path) == ["--resume", path, "end"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--resume", "contains no {path} and is not a preset (transformers, lightning, megatron)"),
        ("huggingface", "is not a preset"),
        ("", "contains no {path}"),
        ("--resume {checkpoint}", "contains {checkpoint}; available: {path}, {dir}, {name}, {step}"),
        ("--resume {}", "contains {}; available:"),
        ("--resume '{path}", "cannot be split into arguments: No closing quotation"),
    ],
)
def test_what_cannot_be_a_template(text: str, why: str) -> None:
    assert why in (check_template(text) or "")


@given(st.text(), st.text())
def test_every_accepted_template_can_be_used(text: str, path: str) -> None:
    if check_template(text) is None:
        assert isinstance(resume_args(text, f"{path}/step-1"), list)


def test_every_preset_is_a_template() -> None:
    for name, template in PRESETS.items():
        assert check_template(name) is None
        assert check_template(template) is None
        assert shlex.split(template)[0].startswith("--")
