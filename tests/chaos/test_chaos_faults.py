"""Faults as values: the same seed chooses the same ones; and damage, done to exactly one file."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.chaos.damage import damage
from gpulaunch.launcher.chaos.faults import DAMAGES, RANDOM, Verb, choose
from gpulaunch.launcher.runs.processes import RunError


@given(st.integers(), st.integers(1, 16), st.sets(st.sampled_from(Verb), min_size=1))
def test_the_seed_decides(seed: int, ranks: int, verbs: set[Verb]) -> None:
    chosen = sorted(verbs, key=lambda verb: verb.value)
    first, second = random.Random(seed), random.Random(seed)
    several = [choose(first, chosen, range(ranks)) for _ in range(5)]

    assert several == [choose(second, chosen, range(ranks)) for _ in range(5)]
    assert all(fault.verb in verbs and 0 <= fault.rank < ranks and fault.how in DAMAGES for fault in several)


def test_random_faults_are_those_that_a_job_survives() -> None:
    assert set(Verb) - set(RANDOM) == {Verb.KILL_AGENT}


# -- damage


def checkpoint(path, sizes=(("a.bin", 1000), ("gpulaunch-manifest.json", 5000), (".metadata", 10), ("empty", 0))):
    path.mkdir()
    for name, size in sizes:
        (path / name).write_bytes(bytes(size))
    return {name: bytes(size) for name, size in sizes}


def content(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", range(20))
def test_exactly_one_file_of_data_is_damaged(tmp_path, how: str, seed: int) -> None:
    before = checkpoint(tmp_path / "step-1")
    said = damage(str(tmp_path / "step-1"), how, random.Random(seed))
    after = content(tmp_path / "step-1")

    (name,) = [name for name in before if after.get(name) != before[name]]
    assert name in said
    assert name in ("a.bin", ".metadata")
    if how == "remove":
        assert name not in after
    elif how == "truncate":
        assert len(after[name]) == len(before[name]) // 2
    else:
        flipped = [bin(a ^ b).count("1") for a, b in zip(before[name], after[name], strict=True)]
        assert sum(flipped) == 1


def test_a_checkpoint_of_one_file(tmp_path) -> None:
    file = tmp_path / "model_5.pt"
    file.write_bytes(bytes(100))

    assert damage(str(file), "truncate", random.Random(0)) == "cut model_5.pt from 100 to 50 bytes"
    assert file.stat().st_size == 50


def test_nothing_to_damage(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="contains no file"):
        damage(str(tmp_path / "empty"), "flip", random.Random(0))
    with pytest.raises(RunError):
        damage(str(tmp_path / "not there"), "flip", random.Random(0))
