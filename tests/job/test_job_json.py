"""job.json: what a run was started with, for those who look at it later; and nothing that only the user should know."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.launcher.job.describe import describe
from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.job_json import job_document, with_preloaded
from gpulaunch.launcher.job.plan import rank_environment
from gpulaunch.launcher.job.spec import Request

Load = Callable[..., Request]


def test_no_secret_of_the_command_line_or_the_job_file_is_in_it(
    job: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text('script = "train.py"\n[env]\nHF_TOKEN = "hunter1"\nLEVEL = "3"\n')
    words = ["--config", "job.toml", "train.py", "--hf-token", "hunter2", "--api_key=hunter3", "--lr", "1"]
    words += ["--db.passwd", "hunter4", "--url", "https://me:hunter5@example.org"]
    monkeypatch.setattr(sys, "argv", ["gpulaunch", *words])

    document = job_document(job(*words, program=False).spec)

    assert "hunter" not in json.dumps(document)
    assert document["env"] == {"HF_TOKEN": "<redacted>", "LEVEL": "3"}
    assert document["command"] == [
        *("gpulaunch", "--config", "job.toml", "train.py"),
        *("--hf-token", "<redacted>", "--api_key=<redacted>", "--lr", "1"),
        *("--db.passwd", "<redacted>", "--url", "https://me:<redacted>@example.org"),
    ]


def test_a_secret_is_known_by_its_value_wherever_it_stands(
    job: Load, make_host: Callable[..., HostInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, key = "ghp_0123456789abcdefghij0123456789abcdef", "AKIAIOSFODNN7EXAMPLE"
    (tmp_path / "job.toml").write_text(
        f'script = "train.py"\n[env]\nDATA_URL = "s3://me:hunter2@store/x"\nEXTRA = "{key}"\nLEVEL = "3"\n'
    )
    words = ["--config", "job.toml", "--resume-arg", f"--from {{path}} --with {token}"]
    words += ["--metrics-push", "http://me:hunter3@push:9091", "train.py", "--data", f"x:{token}"]
    monkeypatch.setattr(sys, "argv", ["gpulaunch", *words])
    spec = job(*words, program=False).spec

    for text in (json.dumps(job_document(spec)), describe(spec, make_host())):
        assert "hunter" not in text
        assert token not in text
        assert key not in text
        assert "s3://me:<redacted>@store/x" in text
    assert (
        rank_environment(spec, local_rank=0, attempt=0, master_port=1, error_file="", use_agent_store=True)["EXTRA"]
        == key
    ), "what a rank gets is what was given"


def test_it_says_what_the_job_ran_on(job: Load, tmp_path: Path) -> None:
    """By what lies where Python looks: of two, the first is the one that is imported."""
    near, far = tmp_path / "near", tmp_path / "far"
    for directory in (
        near / "torch-2.13.0+cu130.dist-info",
        near / "nvidia_ml_py-13.5.dist-info",
        near / "Some.Package-0.1.dist-info",
        far / "torch-2.6.0.dist-info",
        far / "not_asked_for-1.0.dist-info",
    ):
        directory.mkdir(parents=True)

    path = [str(tmp_path / "gone"), str(near), str(far)]
    versions = job_document(job().spec, ["some_package"], path=path)["versions"]

    assert isinstance(versions, dict)
    assert versions.pop("python") == sys.version.split()[0]
    assert versions.pop("kernel")
    versions.pop("nvidia-driver", None)
    assert versions == {"torch": "2.13.0+cu130", "nvidia-ml-py": "13.5", "some_package": "0.1"}


def test_it_and_the_plan_say_what_is_preloaded_and_what_is_not(job: Load, make_host: Callable[..., HostInfo]) -> None:
    spec, refused = job("--preload", "kept,left").spec, {"left": "it opened 1 socket(s)"}

    forked = job_document(spec, ["kept", "left"], refused=refused)["preloading"]
    spawned = job_document(spec, ["kept"], spawn_because="there is a module torch next to the script")["preloading"]

    assert forked == {"packages": ["torch", "kept"], "refused": refused, "spawn_because": ""}
    assert spawned == {"packages": [], "refused": {}, "spawn_because": "there is a module torch next to the script"}
    assert with_preloaded({"version": 1, "preloading": forked}, ["torch"], {"kept": "it made a lock"}, "") == {
        "version": 1,
        "preloading": {
            "packages": ["torch"],
            "refused": {"left": "it opened 1 socket(s)", "kept": "it made a lock"},
            "spawn_because": "",
        },
    }
    assert "torch, kept (named; each must pass the checks for forking); not left: it opened 1" in describe(
        spec, make_host(), refused=refused
    )
