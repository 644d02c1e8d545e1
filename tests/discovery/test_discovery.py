"""The file that tells Prometheus of a run: whole when it is there, there while the run is, nobody else's business."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.exporters.discovery.announce import Announcement, complaint_about
from gpulaunch.exporters.discovery.target_file import TargetFile
from gpulaunch.exporters.discovery.targets import Target, address_of, document, file_name, is_left_over
from gpulaunch.profiler.record import NodeState

ME = os.getpid()
GONE = 4_000_001  # above the kernel's highest pid where nobody raised it; `alive` decides here anyway
TOKEN = "0123456789abcdef"
WAIT_S = 20.0  # bounds every wait; nothing here takes it unless something is broken


def announcement(directory: Path, **changed: Any) -> Announcement:
    usual: dict[str, Any] = {
        "bound": ("127.0.0.1", 9464),
        "pid": ME,
        "node": "n1",
        "kernel": "boot pid:[1]",
        "alive": lambda pid: pid == ME,
    }
    return Announcement(directory, **{**usual, **changed})


def target(**changed: Any) -> Target:
    usual: dict[str, Any] = {
        "address": "n1:9464",
        "run": "a",
        "node": "n1",
        "name": "train",
        "token": TOKEN,
        "pid": ME,
        "kernel": "boot pid:[1]",
    }
    return Target(**{**usual, **changed})


def groups_in(directory: Path) -> list[dict[str, Any]]:
    """As Prometheus reads the directory: every group of every *.json."""
    return [group for path in sorted(directory.glob("*.json")) for group in json.loads(path.read_bytes())]


def test_a_run_is_announced_while_it_is(node: NodeState, empty_node: NodeState, tmp_path: Path) -> None:
    told = announcement(tmp_path)
    told.tell(empty_node)
    assert list(tmp_path.iterdir()) == []  # nothing has been started yet

    told.tell(node)
    (group,) = groups_in(tmp_path)
    shown = {label: value for label, value in group["labels"].items() if not label.startswith("__")}
    assert group["targets"] == ["127.0.0.1:9464"]
    assert shown == {"run": TOKEN, "node": "n1", "name": "digits_ddp"}
    assert [path.name for path in tmp_path.iterdir()] == [f"gpulaunch-{TOKEN}.json"]

    told.close()
    assert list(tmp_path.iterdir()) == []
    told.close()


def test_a_page_behind_tls_is_asked_for_by_https_and_any_other_as_the_scrape_job_says(
    node: NodeState, tmp_path: Path
) -> None:
    """By http Prometheus would get no answer, and say that the target of a healthy job is down."""
    told = announcement(tmp_path, scheme="https")
    told.tell(node)
    (group,) = groups_in(tmp_path)
    assert group["labels"]["__scheme__"] == "https"

    told.close()
    announcement(tmp_path).tell(node)
    (group,) = groups_in(tmp_path)
    assert "__scheme__" not in group["labels"]


class Hanging(Announcement):
    """One whose directory does not answer until it is told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, bound=("127.0.0.1", 9464), pid=ME, node="n1", kernel="boot pid:[1]")
        self.entered = threading.Event()
        self.answers = threading.Event()

    def tell(self, state: NodeState) -> None:
        self.entered.set()
        assert self.answers.wait(WAIT_S)
        super().tell(state)


def test_a_directory_that_hangs_holds_up_nobody_and_is_told_once_it_is_late(node: NodeState, tmp_path: Path) -> None:
    """Every call here comes back while the directory answers nobody: a call that waits for it would wait for ever."""
    now_s = 100.0
    hanging = Hanging(tmp_path)
    keeper = TargetFile(hanging, clock=lambda: now_s)
    keeper.tell(node)
    assert hanging.entered.wait(WAIT_S)
    keeper.tell(node)
    assert keeper.fault == ""
    now_s += 60.0
    assert keeper.fault == f"cannot announce this run in {tmp_path}: it does not answer"
    keeper.close()
    assert not hanging.answers.is_set()

    hanging.answers.set()
    keeper.close()
    assert list(tmp_path.iterdir()) == [], "it has ended meanwhile: nothing may stay announced"


def test_a_directory_that_comes_back_has_the_file_and_in_the_end_has_not(node: NodeState, tmp_path: Path) -> None:
    directory = tmp_path / "targets"
    keeper = TargetFile(announcement(directory))
    until_s = time.monotonic() + WAIT_S
    while not keeper.fault and time.monotonic() < until_s:
        keeper.tell(node)
    assert keeper.fault == f"cannot announce this run in {directory}: No such file or directory"

    directory.mkdir()
    while not groups_in(directory) and time.monotonic() < until_s:
        keeper.tell(node)
    while keeper.fault and time.monotonic() < until_s:
        keeper.tell(node)
    assert len(groups_in(directory)) == 1
    assert keeper.fault == ""

    keeper.close()
    assert list(directory.iterdir()) == []
    keeper.close()


def test_nodes_that_share_an_id_share_the_label_and_not_the_file(node: NodeState, tmp_path: Path) -> None:
    assert node.group is not None
    other = dataclasses.replace(node, group=dataclasses.replace(node.group, run_id="fedcba", node_rank=1))
    first, second = announcement(tmp_path, run="job-7"), announcement(tmp_path, run="job-7", node="n2")
    first.tell(node)
    second.tell(other)

    assert [group["labels"]["run"] for group in groups_in(tmp_path)] == ["job-7", "job-7"]

    first.close()
    (left,) = groups_in(tmp_path)
    assert left["labels"]["node"] == "n2"


def test_another_user_may_read_it_whatever_the_umask(node: NodeState, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        announcement(tmp_path).tell(node)
    finally:
        os.umask(before)

    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_it_is_written_once_and_a_sidecar_that_is_started_again_takes_it_over(node: NodeState, tmp_path: Path) -> None:
    told = announcement(tmp_path)
    told.tell(node)
    (path,) = tmp_path.iterdir()
    inode = path.stat().st_ino
    told.tell(node)
    assert path.stat().st_ino == inode

    successor = announcement(tmp_path)
    successor.tell(node)
    assert len(groups_in(tmp_path)) == 1
    successor.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("soon", [True, False])
def test_who_has_hardly_begun_takes_away_what_another_announced(node: NodeState, tmp_path: Path, soon: bool) -> None:
    """The sidecar before it died at the end of the run; with `soon` it has told of nothing itself."""
    announcement(tmp_path).tell(node)
    successor = announcement(tmp_path)
    if soon:
        successor.close(node)
    else:
        keeper = TargetFile(successor)
        keeper.tell(node)
        keeper.close()
    assert list(tmp_path.iterdir()) == []


def test_whoever_looks_meanwhile_sees_a_whole_file_or_none(node: NodeState, tmp_path: Path) -> None:
    """A reader that never stops, against a writer that never stops."""
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("*.json"):
                try:
                    content = path.read_bytes()
                except FileNotFoundError:
                    continue
                seen.append(len(json.loads(content)))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        while len(seen) < 200 and reader.is_alive():
            told = announcement(tmp_path)
            told.tell(node)
            told.close()
    finally:
        stop.set()
        reader.join()

    assert set(seen) == {1}  # json.loads has raised on none of them
    assert len(seen) >= 200
    assert list(tmp_path.iterdir()) == []


def test_files_of_runs_that_were_killed_are_removed_and_no_others(node: NodeState, tmp_path: Path) -> None:
    left = {
        "killed": target(token="killed", pid=GONE),
        "living": target(token="living"),
        "other-machine": target(token="other-machine", pid=GONE, kernel="another boot pid:[1]"),
        "other-container": target(token="other-container", pid=GONE, kernel="boot pid:[2]"),
    }
    for each in left.values():
        (tmp_path / file_name(each)).write_bytes(document(each))
    foreign = {
        "mine.json": b'[{"targets": ["a:1"]}]',
        "gpulaunch-odd.json": b"[",
        "gpulaunch-list.json": b"[]",
        "gpulaunch-deep.json": b"[" * 50_000,
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gpulaunch-link.json").symlink_to(tmp_path / "gpulaunch-killed.json")
    (tmp_path / "gpulaunch-directory.json").mkdir()

    announcement(tmp_path).tell(node)

    gone = {"gpulaunch-killed.json"}
    there = {f"gpulaunch-{name}.json" for name in left} - gone | set(foreign)
    there |= {"gpulaunch-link.json", "gpulaunch-directory.json", f"gpulaunch-{TOKEN}.json"}
    assert {path.name for path in tmp_path.iterdir()} == there


def test_where_the_kernel_does_not_tell_nobody_is_judged() -> None:
    content = document(target(kernel="", pid=GONE))

    assert not is_left_over(content, kernel="", alive=lambda _: False)


def test_a_link_in_the_way_leads_nowhere(node: NodeState, tmp_path: Path) -> None:
    """The directory may be everybody's."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "targets"
    directory.mkdir()
    for name in (f"gpulaunch-{TOKEN}.json", f"gpulaunch-{TOKEN}.json.tmp"):
        (directory / name).symlink_to(victim)

    told = announcement(directory)
    told.tell(node)

    assert victim.read_text() == "precious"
    assert told.fault == ""
    assert len(groups_in(directory)) == 1


def test_a_directory_that_goes_and_comes_again_is_no_reason_to_stop(node: NodeState, tmp_path: Path) -> None:
    directory = tmp_path / "targets"
    told = announcement(directory)
    told.tell(node)
    assert told.fault == f"cannot announce this run in {directory}: No such file or directory"

    directory.mkdir()
    told.tell(node)
    assert told.fault == ""
    assert len(groups_in(directory)) == 1


def test_what_is_wrong_with_a_directory_is_said_before_the_start(tmp_path: Path) -> None:
    assert complaint_about(tmp_path) is None
    missing = complaint_about(tmp_path / "elsewhere")
    assert missing is not None
    assert missing.startswith(f"there is no directory {tmp_path}/elsewhere; ")
    (tmp_path / "file").touch()
    assert complaint_about(tmp_path / "file") is not None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:9464"),
        ("10.0.0.7", "10.0.0.7:9464"),
        ("0.0.0.0", "n1:9464"),
        ("::", "n1:9464"),
        ("", "n1:9464"),
        ("::1", "[::1]:9464"),
    ],
)
def test_the_address_is_one_that_can_be_reached(host: str, address: str) -> None:
    assert address_of(host, 9464, "n1") == address


@example(run="\ud800", name="a\nb", node="\x00", token="../..")
@given(run=st.text(), name=st.text(), node=st.text(), token=st.text(min_size=1))
def test_any_words_make_a_file_that_prometheus_reads(run: str, name: str, node: str, token: str) -> None:
    """Labels are valid UTF-8 (surrogates come from arguments that are not), the name stays in its directory."""
    one = target(run=run, name=name, node=node, token=token)

    (group,) = json.loads(document(one))

    assert all(value.encode("utf-8") is not None and value.isprintable() for value in group["labels"].values())
    assert "/" not in file_name(one)
    assert file_name(one).startswith("gpulaunch-")
    assert is_left_over(document(one), kernel=one.kernel, alive=lambda _: False)
    assert not is_left_over(document(one), kernel=one.kernel, alive=lambda _: True)
