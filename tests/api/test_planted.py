"""Checkpoints that another has put there: nothing in them is run."""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpulaunch.checkpoint import Checkpoint, CheckpointError
from gpulaunch.checkpoint.saver import SHARED_FILE, rank_file

pytestmark = pytest.mark.torch


class Noted:
    """An extra whose state is what it is given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Checkpoint, Noted]]:
    """Save a value in a run, then make the Checkpoint of a later run (`same`: a later life of that run)."""

    def make(value: object, *, same: bool = False, **options: Any) -> tuple[Checkpoint, Noted]:
        with monkeypatch.context() as earlier:
            if not same:
                earlier.setenv("GPULAUNCH_RUN_ID", "an earlier run")
            first = Checkpoint(model=torch.nn.Linear(1, 1), dir=tmp_path, extra={"noted": Noted(value)})
        first.resume()
        for _ in first.steps(1):
            first.step()
        (tmp_path / ".owner").unlink()
        noted = Noted(None)
        return Checkpoint(model=torch.nn.Linear(1, 1), dir=tmp_path, extra={"noted": noted}, **options), noted

    return make


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PLANTED"],)


def for_all_to_write(file: Path) -> None:
    file.chmod(0o666)


def of_another(file: Path) -> None:
    os.chown(file, 65534, 65534)


ANOTHER_RUN = [(name, None) for name in (SHARED_FILE, rank_file(0), ".metadata")]
FORGED = [(name, for_all_to_write) for name in (SHARED_FILE, ".metadata")]
FORGED_BY_ANOTHER = [pytest.param(name, of_another, marks=pytest.mark.root) for name in (SHARED_FILE, ".metadata")]


@pytest.mark.parametrize(("name", "forged"), [*ANOTHER_RUN, *FORGED, *FORGED_BY_ANOTHER])
def test_a_planted_pickle_is_not_run(
    tmp_path: Path,
    again: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    forged: Callable[[Path], None] | None,
) -> None:
    """`forged`: its manifest bears this run's own id."""
    later, _ = again(1, same=forged is not None)
    monkeypatch.setenv("PLANTED", str(tmp_path / "it ran"))
    monkeypatch.setenv("GPULAUNCH_RESUME_FROM", str(tmp_path / "step-000000000001"))  # as the launcher found it
    file = tmp_path / "step-000000000001" / name
    if name == ".metadata":
        file.write_bytes(pickle.dumps(Planted()))
    else:
        torch.save({"version": 1, "skeleton": Planted()}, file)
    if forged is not None:
        forged(file)

    with pytest.raises(CheckpointError, match=rf"{name} holds posix\.mkdir, .*Checkpoint\(weights_only=False\)"):
        later.resume()

    assert not (tmp_path / "it ran").exists()


def test_plain_values_and_numpys_are_loaded(again: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    value = {"a": [1, 2.5, None, "x", (True,)], "b": np.float64(1.5), "c": np.arange(3), "d": {1, 2}}
    later, noted = again(value)

    assert later.resume() == 1
    assert str(noted.value) == str(value)
    assert "which is not" not in capfd.readouterr().err


def test_what_the_program_has_declared_safe_stays_so(again: Callable[..., Any]) -> None:
    with torch.serialization.safe_globals([np.ndarray]):
        later, _ = again(np.arange(3))
        later.resume()
        assert np.ndarray in torch.serialization.get_safe_globals()
    assert np.dtype not in torch.serialization.get_safe_globals()


def test_objects_of_other_classes_are_told_of_when_they_are_saved_and_need_a_word(
    tmp_path: Path, again: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    when = datetime.date(2026, 1, 1)
    later, _ = again(when)
    assert capfd.readouterr().err.count("holds datetime.date, which is not a plain value") == 1

    with pytest.raises(CheckpointError, match=r"holds datetime\.date"):
        later.resume()

    (tmp_path / ".owner").unlink()
    noted = Noted(None)
    trusting = Checkpoint(model=torch.nn.Linear(1, 1), dir=tmp_path, extra={"noted": noted}, weights_only=False)
    assert trusting.resume() == 1
    assert noted.value == when


def test_a_restart_of_the_run_that_saved_them_needs_none(again: Callable[..., Any]) -> None:
    later, noted = again(datetime.date(2026, 1, 1), same=True)

    assert later.resume() == 1
    assert noted.value == datetime.date(2026, 1, 1)
