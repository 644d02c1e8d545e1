"""Counted stacks: every sum stays true, memory is bounded, and the file comes back as it was."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.folded import ELSEWHERE, STACKS_FILE, Folded, labels_of, load, parse_line
from gpulaunch.profiler.samplers.phases import STACK_PHASES
from gpulaunch.profiler.stack import Frame

HOSTILE = 'a;b\n<script>alert("x")</script>\x1b[2J\u202e 17'


def frame(name: str, file: str = "/home/me/project/train.py", line: int = 1) -> Frame:
    return Frame(name=name, file=file, line=line)


def counted(folded: Folded, phase: str = "forward") -> dict[tuple[str, ...], int]:
    return dict(folded.stacks(phase))


# -- counting


def test_equal_stacks_of_one_phase_are_one() -> None:
    folded = Folded()
    folded.add("forward", ("main", "loss"))
    folded.add("forward", ("main", "loss"), 2)
    folded.add("forward", ("main",))
    folded.add("backward", ("main", "loss"))

    assert counted(folded) == {("main", "loss"): 3, ("main",): 1}
    assert folded.samples() == {"forward": 4, "backward": 1}


def test_phases_come_in_their_order() -> None:
    folded = Folded()
    for phase in reversed(STACK_PHASES):
        folded.add(phase, ("main",))

    assert tuple(folded.samples()) == STACK_PHASES


def test_the_stacks_seen_most_often_are_kept_and_the_rest_is_one() -> None:
    folded = Folded(max_stacks=8)
    for round_ in range(50):
        folded.add("forward", ("main", "hot"), 10)
        folded.add("forward", ("main", f"once {round_}"))

    stacks = counted(folded)
    assert len(stacks) <= 8
    assert stacks["main", "hot"] == 500
    assert stacks[ELSEWHERE,] >= 40
    assert sum(stacks.values()) == folded.samples()["forward"] == 550


def test_labels_that_are_in_no_stack_any_more_make_room() -> None:
    """A program that makes new names without end, and one that is there all the time, found late."""
    folded = Folded(max_stacks=4, max_labels=16)
    for number in range(200):
        folded.add("forward", ("main", f"made {number}"))
    for _ in range(3):
        folded.add("forward", ("main", "late"))

    assert counted(folded)["main", "late"] == 3
    assert folded.samples() == {"forward": 203}


def test_labels_without_end_in_one_stack_are_elsewhere() -> None:
    folded = Folded(max_labels=5)
    folded.add("forward", [f"f{number}" for number in range(9)])

    (stack,) = counted(folded)
    assert stack == ("f0", "f1", "f2", "f3", "f4", *[ELSEWHERE] * 4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(STACK_PHASES[:3]), st.lists(st.sampled_from("abcdefgh"), min_size=1), st.integers(1, 9)
        )
    )
)
@example(
    [
        *(("startup", ["f"], 1), ("data_wait", ["a", "a"], 1), ("data_wait", ["a", "b"], 1), ("data_wait", ["d"], 1)),
        *(("startup", ["c", "e"], 1), ("data_wait", ["a"], 1), ("data_wait", ["b"], 1), ("startup", ["a"], 1)),
    ]
)
def test_no_sample_is_ever_lost(added: list[tuple[str, list[str], int]]) -> None:
    folded = Folded(max_stacks=4, max_labels=5)
    for phase, labels, count in added:
        folded.add(phase, labels, count)

    for phase in STACK_PHASES[:3]:
        wanted = sum(count for to, _, count in added if to == phase)
        assert sum(counted(folded, phase).values()) == wanted == folded.samples().get(phase, 0)
        assert len(counted(folded, phase)) <= 5  # four, and (elsewhere)


def test_two_thousand_deep_stacks_of_every_phase_are_a_few_megabytes() -> None:
    """Of what is stored: the labels once, and four bytes for each frame, beside an object and its count."""
    labels = [f"frame {number}" for number in range(5000)]
    tracemalloc.start()
    folded = Folded()
    for phase in STACK_PHASES:
        for number in range(2000):
            folded.add(phase, [labels[(number * 31 + depth) % 5000] for depth in range(50)])
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert held_bytes <= 28_000 * (256 + 4 * 50)


# -- labels


def test_a_label_has_the_name_and_the_place() -> None:
    frames = (
        frame("conv", "/venv/lib/python3.11/site-packages/torch/nn/functional.py", 12),
        frame("read", "/usr/lib/python3.13t/gzip.py", 3),
        frame("<module>", "train.py", 9),
    )

    assert labels_of(frames) == ("<module> (train.py:9)", "read (gzip.py:3)", "conv (torch/nn/functional.py:12)")
    assert labels_of((frame("f", "/home/me/project/model/net.py"),)) == ("f (model/net.py:1)",)


def test_how_a_rank_is_started_is_left_out() -> None:
    loop = "/venv/lib/python3.11/site-packages/gpulaunch/launcher/loop"
    frames = (
        frame("step"),
        frame("<module>"),
        frame("_run_code", "<frozen runpy>"),
        frame("run_path", "/usr/lib/python3.11/runpy.py"),
        frame("_run_as_main", f"{loop}/rank_main.py"),
        frame("run", f"{loop}/rank_main.py"),
        frame("main", f"{loop}/forkserver_main.py"),
        frame("<module>", "<string>"),
    )

    assert labels_of(frames) == ("<module> (project/train.py:1)", "step (project/train.py:1)")
    assert (
        labels_of(frames[5:])[-1] == "run (gpulaunch/launcher/loop/rank_main.py:1)"
    )  # it is not in the program at all


def test_taps_are_left_out_and_what_they_call_of_ours_stays() -> None:
    probe = "/home/me/gpulaunch/profiler/probe"
    tap, ours, program = frame("tap", f"{probe}/edges.py"), frame("note", f"{probe}/sites.py"), frame("<module>")
    users = "<module> (project/train.py:1)"

    assert labels_of((frame("next"), tap, program)) == (users, "next (project/train.py:1)")
    assert labels_of((tap, program)) == (users,)  # what it passes the call on to is no Python
    assert labels_of((ours, tap, program)) == (users, "note (probe/sites.py:1)")
    assert labels_of((tap, frame("next"), tap, program)) == (users, "next (project/train.py:1)")


def test_names_of_any_content_are_fit_for_a_line() -> None:
    (label,) = labels_of((frame(HOSTILE),))

    assert label.isprintable()
    assert ";" not in label
    assert label.startswith('a,b?<script>alert("x")</script>?[2J? 17 (')


def test_of_a_deep_recursion_both_ends_are_shown() -> None:
    labels = labels_of([frame(f"f{depth}") for depth in range(1000)])

    assert len(labels) < 200
    assert labels[0].startswith("f999 ")
    assert labels[-1].startswith("f0 ")
    assert "(left out)" in labels


# -- the file


names = st.text() | st.sampled_from(["", ";", " 5", "\n", HOSTILE, "\ud800"])
frames_ = st.lists(st.builds(Frame, name=names, file=names, line=st.integers(0, 1 << 31)), min_size=1, max_size=300)


@given(st.lists(st.tuples(st.sampled_from(STACK_PHASES), frames_), max_size=8))
def test_what_was_counted_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[str, list[Frame]]]
) -> None:
    folded = Folded()
    for phase, frames in taken:
        folded.add(phase, labels_of(frames))
    path = tmp_path_factory.getbasetemp() / STACKS_FILE
    folded.save(path)
    again = load(path, Folded())

    assert again.samples() == folded.samples()
    assert all(counted(again, phase) == counted(folded, phase) for phase in STACK_PHASES)


def test_the_file_is_for_its_owner_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / STACKS_FILE
    path.write_text("old\n")
    held = path.open()
    folded = Folded()
    folded.add("forward", ("main (a.py:1)", "f (b.py:2)"), 3)
    folded.save(path)

    assert path.read_text() == "forward;main (a.py:1);f (b.py:2) 3\n"
    assert held.read() == "old\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [STACKS_FILE]
    held.close()


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"{STACKS_FILE}.tmp").symlink_to(victim)

    Folded().save(tmp_path / STACKS_FILE)

    assert victim.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == sorted(["victim", STACKS_FILE])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "forward",
        "forward 3",
        "forward; x",
        "forward;main 0",
        "forward;main -1",
        "forward;main 1e3",
        "nowhere;main 1",
    ],
)
def test_a_line_that_is_none_is_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / STACKS_FILE).write_text(f"{line}\nforward;main 3\n")

    assert parse_line(line) is None
    assert load(tmp_path / STACKS_FILE, Folded()).samples() == {"forward": 3}


@given(st.text())
def test_any_line_can_be_read(line: str) -> None:
    parsed = parse_line(line)

    assert parsed is None or all(label and label.isprintable() and ";" not in label for label in parsed[1])


@given(st.binary())
def test_any_file_can_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / STACKS_FILE
    path.write_bytes(content)

    load(path, Folded())


def test_a_file_that_cannot_be_ours_is_refused(tmp_path: Path) -> None:
    with (tmp_path / STACKS_FILE).open("wb") as file:
        file.truncate(1 << 30)

    with pytest.raises(OSError, match="too large"):
        load(tmp_path / STACKS_FILE, Folded())
