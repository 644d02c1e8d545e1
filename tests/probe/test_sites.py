"""Which line of a program is told, and that however many there are, the page holds them."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.channel.layout import SITE_KINDS, SITE_ROWS
from gpulaunch.profiler.channel.segment import SegmentReader, Site
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.sites import Sites, asked_for, caller, line_of_user, path_of, place_of

ITEM = SITE_KINDS.index("item")
CPU = SITE_KINDS.index("cpu")


def in_module(name: str, source: str, filename: str = "somewhere.py", **names: Any) -> dict[str, Any]:
    """The names of a module of this name with this source."""
    space = {"__name__": name, **names}
    exec(compile(source, filename, "exec"), space)
    return space


def this_line() -> int:
    return sys._getframe(1).f_lineno


def test_the_line_told_is_the_one_that_calls_into_torch() -> None:
    told: list[str] = []
    source = "def item():\n    told.append(place_of(caller()))"
    item = in_module("torch.nn.modules.linear", source, caller=caller, place_of=place_of, told=told)["item"]

    line = this_line() + 1
    item()

    code = sys._getframe().f_code
    assert told == [f"{path_of(code)}:{line} {code.co_name}"]


def test_a_library_that_is_not_torch_is_a_part_of_the_program() -> None:
    torchvision = in_module("torchvision.ops", "def load():\n    return caller()", caller=caller)

    found = torchvision["load"]()

    assert (found.f_code.co_name, found.f_globals["__name__"]) == ("load", "torchvision.ops")


def test_a_value_that_is_logged_is_told_at_the_line_that_logs() -> None:
    """`float()` is called within the standard library."""
    told: list[str] = []
    source = "class Loss:\n    def __float__(self):\n        told.append(caller().f_code.co_name)\n        return 0.5"
    loss = in_module("torch", source, caller=caller, told=told)["Loss"]()
    logger = logging.getLogger("of this test")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(io.StringIO()))

    def log() -> None:
        logger.warning("loss %f", loss)

    log()

    assert told == ["log"]


def test_code_that_torch_generates_is_not_the_program() -> None:
    space = in_module("torch.fx", "def forward():\n    return caller()", "<eval_with_key>.0", caller=caller)
    del space["__name__"]

    found = space["forward"]()

    assert found is sys._getframe()


def test_a_stack_that_is_not_so_high_has_no_line() -> None:
    """C++ may call a tap with nothing below it."""
    assert caller(10_000) is None


def test_a_thread_of_torchs_own_has_no_line() -> None:
    found: list[FrameType | None] = []
    pin = in_module("torch.utils.data._utils", "def pin():\n    found.append(caller())", caller=caller, found=found)[
        "pin"
    ]
    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()

    assert found == [None]


def test_the_line_is_the_users_own(tmp_path: Path):
    """A package's function, called by the program, calls back: nearer is the package."""
    package = tmp_path / "site-packages" / "trainer.py"
    namespace: dict[str, Any] = {"line_of_user": line_of_user, "__name__": "trainer"}
    exec(compile("def prepare():\n    return line_of_user()\n", str(package), "exec"), namespace)

    def direct() -> tuple[str, bool]:
        return line_of_user()

    def through_a_package() -> tuple[str, bool]:
        return namespace["prepare"]()

    (direct_line, direct_by_package), (package_line, by_package) = direct(), through_a_package()

    assert (direct_by_package, by_package) == (False, True)
    assert re.fullmatch(r".*test_sites.py:\d+ direct", direct_line)
    assert re.fullmatch(r".*test_sites.py:\d+ through_a_package", package_line)


@pytest.mark.parametrize(("function", "told"), [("log", "step"), ("fit", "fit")])
def test_what_a_package_does_for_a_line_is_told_at_that_and_what_a_trainer_does_by_itself_at_its_own(
    tmp_path: Path, function: str, told: str
) -> None:
    namespace: dict[str, Any] = {"__name__": "trainer", "caller": caller}
    package = str(tmp_path / "site-packages" / "trainer.py")
    exec(compile(f"def {function}():\n    return asked_for(caller())\n", package, "exec"), namespace)
    namespace["asked_for"] = asked_for

    def step() -> FrameType:
        frame: FrameType = namespace[function]()
        return frame

    assert step().f_code.co_name == told


def test_a_program_that_is_nothing_but_packages_has_the_nearest_line(tmp_path: Path) -> None:
    space = {"__name__": "trainer", "line_of_user": line_of_user, "told": []}
    source = "def prepare():\n    told.append(line_of_user())\nprepare()"
    path = str(tmp_path / "dist-packages" / "trainer" / "main.py")
    thread = threading.Thread(target=exec, args=(compile(source, path, "exec"), space))
    thread.start()
    thread.join()

    assert space["told"] == [("trainer/main.py:2 prepare", True)]


def test_above_a_frame_the_next_one_is_found() -> None:
    def outer() -> tuple[FrameType | None, FrameType | None]:
        return inner()

    def inner() -> tuple[FrameType | None, FrameType | None]:
        frame = sys._getframe()
        return frame, caller(above=frame)

    frame, found = outer()

    assert frame is not None
    assert found is frame.f_back


@pytest.mark.parametrize(
    ("filename", "told"),
    [
        ("{here}/train.py", "train.py"),
        ("{here}/src/model.py", "src/model.py"),
        ("/elsewhere/train.py", "/elsewhere/train.py"),
        ("/venv/lib/python3.11/site-packages/accelerate/data_loader.py", "accelerate/data_loader.py"),
        ("/usr/lib/python3/dist-packages/trainer/main.py", "trainer/main.py"),
        ("/home/me/my-packages/train.py", "/home/me/my-packages/train.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_a_path_is_told_as_people_know_it(filename: str, told: str) -> None:
    code = compile("pass", filename.format(here=os.getcwd()), "exec")

    assert path_of(code) == told


def test_a_working_directory_that_is_gone_costs_nothing_but_the_short_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert path_of(compile("pass", "/somewhere/train.py", "exec")) == "/somewhere/train.py"


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    made = SegmentWriter(path)
    yield made
    made.close()


def rows_of(tmp_path: Path) -> tuple[Site, ...]:
    with SegmentReader(str(tmp_path / "rank-0.bin")) as reader:
        return reader.sites()


def code_of(source: str) -> CodeType:
    return compile(source, "/program/train.py", "exec")


def run(code: CodeType, see: Callable[[], object]) -> None:
    exec(code, {"__name__": "program", "see": see})


def test_a_line_has_one_row_however_often_it_runs(writer: SegmentWriter, tmp_path: Path) -> None:
    sites = Sites(writer)
    run(code_of("for _ in range(50):\n    see()\nsee()"), lambda: writer.site(sites.row(ITEM, caller())))

    # `see` is a function of this test's, and the innermost of the program: it is one line here.
    (row,) = rows_of(tmp_path)
    assert (row.kind, row.count) == ("item", 51)
    assert row.text.startswith(("tests/probe/test_sites.py:", str(Path(__file__))))


def test_each_line_and_each_kind_has_its_own(writer: SegmentWriter, tmp_path: Path) -> None:
    sites = Sites(writer)

    def see(kind: int) -> None:
        writer.site(sites.row(kind, sys._getframe(1)))

    exec(code_of("for _ in range(3):\n    see(4); see(4)\n    see(4)\n    see(7)"), {"see": see})

    assert [(row.kind, row.text, row.count) for row in rows_of(tmp_path)] == [
        ("item", "/program/train.py:2 <module>", 6),
        ("item", "/program/train.py:3 <module>", 3),
        ("cpu", "/program/train.py:4 <module>", 3),
    ]


def test_code_that_is_made_anew_each_time_is_one_line(writer: SegmentWriter, tmp_path: Path) -> None:
    sites = Sites(writer)
    for _ in range(1000):
        exec(code_of("see()"), {"see": lambda: writer.site(sites.row(ITEM, sys._getframe(1)))})

    rows = {row.text: row.count for row in rows_of(tmp_path)}
    assert rows["/program/train.py:1 <module>"] == 512, "beyond that places are remembered no more"
    assert rows[""] == 1000 - 512


def test_what_finds_no_row_is_elsewhere(writer: SegmentWriter, tmp_path: Path) -> None:
    sites = Sites(writer)
    lines = 2 * SITE_ROWS
    exec(code_of("see()\n" * lines), {"see": lambda: writer.site(sites.row(ITEM, sys._getframe(1)))})

    rows = rows_of(tmp_path)
    assert len(rows) == SITE_ROWS
    assert rows[0].kind == "elsewhere"
    assert rows[0].count == lines - (SITE_ROWS - 1)
    assert sites.row(ITEM, None) == 0, "no frame, no line"


def test_a_new_line_may_be_told_better(writer: SegmentWriter, tmp_path: Path) -> None:
    sites = Sites(writer)
    asked: list[int] = []

    def tell(frame: FrameType) -> tuple[int, str] | None:
        asked.append(frame.f_lineno)
        return (CPU, "seen by tell") if frame.f_lineno == 2 else None

    exec(
        code_of("for _ in range(4):\n    see()\n    see()"),
        {"see": lambda: writer.site(sites.row(ITEM, sys._getframe(1), tell))},
    )

    assert asked == [2, 3], "once each"
    assert [(row.kind, row.text, row.count) for row in rows_of(tmp_path)] == [
        ("cpu", "seen by tell", 4),
        ("item", "/program/train.py:3 <module>", 4),
    ]
