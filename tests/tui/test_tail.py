"""The end of a log: of any size, of anything, and not read whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import views

from gpulaunch.exporters.tui.tail import LogPlace, read_tail
from gpulaunch.exporters.view.text import inert

PLACE = LogPlace(node=0, attempt=2, rank=7, stream="stderr")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "attempts" / "2" / "rank-7" / "stderr.log"
    path.parent.mkdir(parents=True)
    return path


def test_a_short_log_is_shown_whole(log: Path, tmp_path: Path) -> None:
    log.write_text("first\n  second\n\nlast")

    tail = read_tail(tmp_path, PLACE)

    assert (tail.lines, tail.earlier, tail.size_bytes) == (("first", "  second", "", "last"), False, 20)
    assert (tail.path, tail.trouble) == ("attempts/2/rank-7/stderr.log", "")


def test_of_a_large_log_only_the_end_is_read(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_bytes(b"".join(b"line %d\n" % at for at in range(1_000_000)))
    asked: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: asked.append(size) or pread(fd, size, at))

    tail = read_tail(tmp_path, PLACE)

    assert sum(asked) <= 1 << 16
    assert (tail.lines[-1], len(tail.lines), tail.earlier) == ("line 999999", 1000, True)
    assert all(each.startswith("line ") for each in tail.lines)


def test_one_endless_line_is_cut(log: Path, tmp_path: Path) -> None:
    log.write_bytes(b"x" * 3_000_000)

    (line,) = read_tail(tmp_path, PLACE).lines

    assert len(line) < 2100
    assert line.endswith("characters more")


def test_a_progress_bar_is_shown_as_it_stands(log: Path, tmp_path: Path) -> None:
    log.write_bytes(b"  1%|#\r 50%|#####\r\x1b[32m100%|##########\x1b[0m\r\nnext\r\n")

    assert read_tail(tmp_path, PLACE).lines == ("100%|##########", "next")


def test_what_a_terminal_would_obey_is_shown_instead(log: Path, tmp_path: Path) -> None:
    log.write_bytes(views.HOSTILE.encode("utf-8", "surrogateescape") + b"\n\xff\xfe\x9b2J\n")

    tail = read_tail(tmp_path, PLACE)

    assert [each for each in tail.lines if inert(each) != each] == []
    assert any("2J" in each for each in tail.lines)


def test_a_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "rank 7 in attempts/2 has no stderr.log here" in read_tail(tmp_path, PLACE).trouble


def test_the_log_of_another_node_is_found_in_the_directory_of_the_job_and_in_its_own(log: Path, tmp_path: Path) -> None:
    """A node without the job's directory has one of its own, and either can be looked at."""
    log.write_text("of this node\n")
    theirs = tmp_path / "node-1" / "attempts" / "2" / "rank-7" / "stderr.log"

    assert read_tail(tmp_path, replace(PLACE, node=1)).lines == ("of this node",)
    theirs.parent.mkdir(parents=True)
    theirs.write_text("of node 1\n")
    tail = read_tail(tmp_path, replace(PLACE, node=1))
    assert (tail.lines, tail.path) == (("of node 1",), "node-1/attempts/2/rank-7/stderr.log")
    assert read_tail(tmp_path, PLACE).lines == ("of this node",)


def test_what_is_no_file_is_not_waited_for(log: Path, tmp_path: Path) -> None:
    os.mkfifo(log)
    assert read_tail(tmp_path, PLACE).trouble == "it is no file"

    log.unlink()
    log.mkdir()
    assert read_tail(tmp_path, PLACE).trouble == "it is no file"


def test_a_link_to_another_file_is_not_followed(log: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    log.symlink_to(secret)

    tail = read_tail(tmp_path, PLACE)

    assert tail.lines == ()
    assert tail.trouble


def test_a_log_of_another_node_is_in_that_node_s_directory(tmp_path: Path) -> None:
    path = tmp_path / "node-3" / "attempts" / "2" / "rank-7" / "stdout.log"
    path.parent.mkdir(parents=True)
    path.write_text("here\n")

    tail = read_tail(tmp_path, LogPlace(node=3, attempt=2, rank=7, stream="stdout"))

    assert tail.lines == ("here",)


def test_with_log_dir_the_rank_s_directory_is_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "stderr.log").write_text("there\n")
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    (tmp_path / "attempts" / "2" / "rank-7").symlink_to(elsewhere)

    assert read_tail(tmp_path, PLACE).lines == ("there",)


def test_secrets_are_not_shown_and_what_only_sounds_like_one_is(log: Path, tmp_path: Path) -> None:
    secrets = [
        "401 for hf_abcdefghijklmnopqrstuvwxyz",
        "python train.py --hf-token my-c4n4ry --lr 0.1",
        "Authorization: Bearer my-c4n4ry",
        "AWS_SECRET_ACCESS_KEY=\x1b[1mmy-c4n4ry\x1b[0m",
        "connect(user='me', password='my-c4n4ry')",
        f"{'x' * 1990} --token my-c4n4ry",
    ]
    ordinary = ["KeyError: 'layer.0.weight'", "num_tokens=4096 loss 0.31", "sorted(x, key=len)", "password?"]
    log.write_text("\n".join(secrets + ordinary))

    lines = read_tail(tmp_path, PLACE).lines

    assert not any("c4n4ry" in line or "abcdef" in line for line in lines)
    assert lines[1] == "python train.py --hf-token <redacted> --lr 0.1"
    assert lines[len(secrets) :] == tuple(ordinary)
