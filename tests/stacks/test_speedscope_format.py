"""What holds a file against speedscope's schema finds what is not as that has it: one fault at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from speedscope_format import faults_of

from gpulaunch.exporters.files.flame import Stack, speedscope

STACKS: list[Stack] = [(("main (train.py:1)", "loss (net.py:5)"), 6), (("main (train.py:1)", "(elsewhere)"), 1)]


def a_file() -> Any:
    return json.loads(json.dumps(speedscope({"all": STACKS, "none": []}, name="run", exporter="gpulaunch")))


def test_what_is_written_is_as_the_schema_has_it() -> None:
    assert faults_of(a_file()) == []


def change(**to: Any) -> Callable[[Any], None]:
    """Give the first profile other values."""
    return lambda content: content["profiles"][0].update(to)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda content: content.pop("$schema"), "schema None"),
        (lambda content: content.update(name=3), "file: name is 3"),
        (lambda content: content.update(version="1"), "file: version is not in the schema"),
        (lambda content: content.update(activeProfileIndex=2), "the profile that is shown first is none"),
        (lambda content: content.update(profiles={}), "no lists of frames and profiles"),
        (lambda content: content["shared"].pop("frames"), "no lists of frames and profiles"),
        (lambda content: content["shared"]["frames"][0].pop("name"), "frame 0 has no name"),
        (lambda content: content["shared"]["frames"][0].update(line="1"), "frame 0: line is '1'"),
        (change(type="tree"), "profile 0: type 'tree'"),
        (change(name=None), "profile 0: no name"),
        (change(unit="samples"), "profile 0: unit 'samples'"),
        (change(startValue=None), "profile 0: from None to 7"),
        (change(endValue=8), "profile 0: weights of 7 from 0 to 8"),
        (change(weights=[7]), "profile 0: not as many weights as samples"),
        (change(weights=[8, -1]), "profile 0: a weight that is none"),
        (change(samples=[[0, 1], [0, 3]]), "profile 0: sample [0, 3] of 3 frames"),
        (change(samples=[[0, 1], [-1]]), "profile 0: sample [-1] of 3 frames"),
    ],
)
def test_each_fault_is_found(damage: Callable[[Any], None], fault: str) -> None:
    content = a_file()
    damage(content)

    assert fault in faults_of(content)
