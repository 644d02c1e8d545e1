"""Arguments changed in the source of a program as users write it, and nothing else in it."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import tokenize
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.launcher.tune.patch import CallChange, IfGiven, diff_of, diff_of_source, patched, patched_all

POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")
WORKERS = {"num_workers": 8}
BOTH = {"num_workers": 8, "persistent_workers": True}

# What it is called; the source, with the call on the line of the first "DataLoader(", "DL(" or "Loader["; the result.
ADDED = {
    "one line": ("x = DataLoader(ds)\n", "x = DataLoader(ds, num_workers=8, persistent_workers=True)\n"),
    "one line, a comma": ("x = DataLoader(ds, )\n", "x = DataLoader(ds, num_workers=8, persistent_workers=True, )\n"),
    "no argument": ("x = DataLoader()\n", "x = DataLoader(num_workers=8, persistent_workers=True)\n"),
    "no argument, two lines": (
        "x = DataLoader(  # (later)\n)\n",
        "x = DataLoader(  # (later)\nnum_workers=8, persistent_workers=True)\n",
    ),
    "no end of the last line": ("x = DataLoader(ds)", "x = DataLoader(ds, num_workers=8, persistent_workers=True)"),
    "lines, no comma": (
        "x = DataLoader(\n    ds,\n    shuffle=True\n)\n",
        "x = DataLoader(\n    ds,\n    shuffle=True,\n    num_workers=8,\n    persistent_workers=True\n)\n",
    ),
    "lines, a comma": (
        "x = DataLoader(\n    ds,\n    shuffle=True,\n)\n",
        "x = DataLoader(\n    ds,\n    shuffle=True,\n    num_workers=8,\n    persistent_workers=True,\n)\n",
    ),
    "lines, the end on the last": (
        "x = DataLoader(ds,\n               shuffle=True)\n",
        "x = DataLoader(ds,\n               shuffle=True, num_workers=8, persistent_workers=True)\n",
    ),
    "a comment after the last, no comma": (
        "x = DataLoader(\n    ds  # a, (b)\n  # and )\n)\n",
        "x = DataLoader(\n    ds,  # a, (b)\n    num_workers=8,\n    persistent_workers=True\n  # and )\n)\n",
    ),
    "a comment after the last, a comma": (
        "x = DataLoader(\n    ds,  # all\n    # s=1,\n)\n",
        "x = DataLoader(\n    ds,  # all\n    num_workers=8,\n    persistent_workers=True,\n    # s=1,\n)\n",
    ),
    "aligned with what is beside the name": (
        "x = DataLoader(ds, 4,\n)\n",
        "x = DataLoader(ds, 4,\n               num_workers=8,\n               persistent_workers=True,\n)\n",
    ),
    "a comma first": (
        "x = DataLoader(\n    ds\n  , shuffle=True\n)\n",
        "x = DataLoader(\n    ds\n  , shuffle=True,\n    num_workers=8,\n    persistent_workers=True\n)\n",
    ),
    "a comma before the end": (
        "x = DataLoader(\n    ds  # c\n, )\n",
        "x = DataLoader(\n    ds, num_workers=8, persistent_workers=True  # c\n, )\n",
    ),
    "a backslash": (
        "x = DataLoader(ds, \\\n    4 \\\n)\n",
        "x = DataLoader(ds, \\\n    4, \\\n    num_workers=8,\n    persistent_workers=True\n)\n",
    ),
    "a parenthesis": ("x = DataLoader((ds))\n", "x = DataLoader((ds), num_workers=8, persistent_workers=True)\n"),
    "a parenthesis around a keyword's value": (
        "x = DataLoader(ds, shuffle=(\n    True\n) )\n",
        "x = DataLoader(ds, shuffle=(\n    True\n), num_workers=8, persistent_workers=True )\n",
    ),
    "a call as the last argument": (
        "x = DataLoader(Subset(\n    ds, range(8),\n))\n",
        "x = DataLoader(Subset(\n    ds, range(8),\n), num_workers=8, persistent_workers=True)\n",
    ),
    "a call as an argument": (
        "x = DataLoader(\n\tSub(ds),\n\tsampler=S(num_workers=1),\n)\n",
        "x = DataLoader(\n\tSub(ds),\n\tsampler=S(num_workers=1),\n\tnum_workers=8,\n\tpersistent_workers=True,\n)\n",
    ),
    "inside a call": (
        "x = prepare(model, torch.utils.data.DataLoader(ds), opt)\n",
        "x = prepare(model, torch.utils.data.DataLoader(ds, num_workers=8, persistent_workers=True), opt)\n",
    ),
    "a lambda": (
        "x = DataLoader(ds, collate_fn=lambda b: (b, 1))\n",
        "x = DataLoader(ds, collate_fn=lambda b: (b, 1), num_workers=8, persistent_workers=True)\n",
    ),
    "in a lambda": (
        "make = lambda ds: data.DataLoader(ds)\n",
        "make = lambda ds: data.DataLoader(ds, num_workers=8, persistent_workers=True)\n",
    ),
    "f-strings": (
        'f(f"{1:>{w}}"); x = DataLoader(f"{root}/{(a, b)}"); f(f"{x}")\n',
        'f(f"{1:>{w}}"); x = DataLoader(f"{root}/{(a, b)}", num_workers=8, persistent_workers=True); f(f"{x}")\n',
    ),
    "a decorator": (
        "@cached\n@over(DataLoader(ds))\ndef f(): ...\n",
        "@cached\n@over(DataLoader(ds, num_workers=8, persistent_workers=True))\ndef f(): ...\n",
    ),
    "not ASCII": (
        's = "\u65e5\U0001f600"; x = DataLoader(ds, "\u00fc")  # \u65e5\n',
        's = "\u65e5\U0001f600"; x = DataLoader(ds, "\u00fc", num_workers=8, persistent_workers=True)  # \u65e5\n',
    ),
    "not ASCII, aligned": (
        's = "\u00e9"; x = DataLoader(ds,\n)\n',
        's = "\u00e9"; x = DataLoader(ds,\n'
        + " " * 24
        + "num_workers=8,\n"
        + " " * 24
        + "persistent_workers=True,\n)\n",
    ),
    "another name": (
        "from torch.utils.data import DataLoader as DL\nx = DL(ds)\n",
        "from torch.utils.data import DataLoader as DL\nx = DL(ds, num_workers=8, persistent_workers=True)\n",
    ),
    "of a type": (
        "x = DataLoader[int](ds)\n",
        "x = DataLoader[int](ds, num_workers=8, persistent_workers=True)\n",
    ),
    "CRLF": (
        "import x\r\nx = DataLoader(\r\n    ds,\r\n)\r\n",
        "import x\r\nx = DataLoader(\r\n    ds,\r\n    num_workers=8,\r\n    persistent_workers=True,\r\n)\r\n",
    ),
    "tabs": (
        "if x:\n\tx = DataLoader(\n\t\tds,\n\t)\n",
        "if x:\n\tx = DataLoader(\n\t\tds,\n\t\tnum_workers=8,\n\t\tpersistent_workers=True,\n\t)\n",
    ),
    "tabs, aligned": (
        "if x:\n\ta = DataLoader(ds,\n)\n",
        "if x:\n\ta = DataLoader(ds,\n\t               num_workers=8,\n\t               persistent_workers=True,\n)\n",
    ),
    "a form feed and an escape that is none": (
        '\f"\\d"\nx = DataLoader(ds)\n',
        '\f"\\d"\nx = DataLoader(ds, num_workers=8, persistent_workers=True)\n',
    ),
    "one of the two is there": (
        "x = DataLoader(ds, num_workers=2, shuffle=True)\n",
        "x = DataLoader(ds, num_workers=8, shuffle=True, persistent_workers=True)\n",
    ),
    "by position": (
        "x = DataLoader(ds, 4, True, None, None, 2)\n",
        "x = DataLoader(ds, 4, True, None, None, 8, persistent_workers=True)\n",
    ),
    "the last by position, on lines": (
        "\n\nx = DataLoader(\n    ds, 4, True, None, None,\n    cpus() - 1\n)\n",
        "\n\nx = DataLoader(\n    ds, 4, True, None, None,\n    8,\n    persistent_workers=True\n)\n",
    ),
}

REPLACED = {
    "a keyword": ("x = DataLoader(ds, num_workers = 2)  # 2\n", "x = DataLoader(ds, num_workers = 8)  # 2\n"),
    "an expression": (
        "x = DataLoader(ds, num_workers=args.workers if args.workers else min(4, cpus()), shuffle=True)\n",
        "x = DataLoader(ds, num_workers=8, shuffle=True)\n",
    ),
    "a parenthesis": ("x = DataLoader(ds, num_workers=(2))\n", "x = DataLoader(ds, num_workers=(8))\n"),
    "lines": (
        "x = DataLoader(\n    ds,\n    num_workers=min(\n        2,\n        4,\n    ),  # few\n)\n",
        "x = DataLoader(\n    ds,\n    num_workers=8,  # few\n)\n",
    ),
    "an f-string": ('x = DataLoader(ds, num_workers=f"{n}")\n', "x = DataLoader(ds, num_workers=8)\n"),
    "not ASCII": (
        'x = DataLoader("\u65e5", num_workers=n["\u00e9"], shuffle="\u00fc")\n',
        'x = DataLoader("\u65e5", num_workers=8, shuffle="\u00fc")\n',
    ),
    "the same": ("x = DataLoader(ds, num_workers=0x8)\n", "x = DataLoader(ds, num_workers=0x8)\n"),
}


def line_of(source: str) -> int:
    at = re.search(r"\b(?:DataLoader|DL)[(\[]", source)
    assert at
    return source.count("\n", 0, at.start()) + 1


@pytest.mark.parametrize(("before", "after"), ADDED.values(), ids=ADDED)
def test_two_arguments(before: str, after: str) -> None:
    assert patched(before, line_of(before), "DataLoader", BOTH, POSITIONS) == after


@pytest.mark.parametrize(("before", "after"), REPLACED.values(), ids=REPLACED)
def test_a_value_replaced(before: str, after: str) -> None:
    assert patched(before, line_of(before), "DataLoader", WORKERS, POSITIONS) == after


def test_a_value_for_what_is_given() -> None:
    source = "x = DataLoader(ds, num_workers=4, prefetch_factor=8)\n"
    arguments = {"prefetch_factor": IfGiven(None), "timeout": IfGiven(0), "num_workers": 0}

    assert patched(source, 1, "DataLoader", arguments) == "x = DataLoader(ds, num_workers=0, prefetch_factor=None)\n"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("x = loader(ds)\n", id="no such call"),
        pytest.param("\nx = DataLoader(ds)\n", id="on another line"),
        pytest.param("x = DataLoader\n", id="no call"),
        pytest.param("x = partial(DataLoader, ds)\n", id="called elsewhere"),
        pytest.param("from mine import Loader as DataLoader; x = DataLoader(ds)\n", id="another of that name"),
        pytest.param("a, b = DataLoader(x), DataLoader(y)\n", id="two on a line"),
        pytest.param("a = DataLoader(DataLoader(x).dataset)\n", id="one in the other"),
        pytest.param("a = f'{DataLoader(x)}'\n", id="in an f-string"),
        pytest.param("a = f'{DataLoader(x)}', DataLoader(y)\n", id="in an f-string, and not"),
        pytest.param("x = DataLoader(ds, **cfg)\n", id="**"),
        pytest.param("x = DataLoader(*args, num_workers=2)\n", id="*"),
        pytest.param("x = DataLoader(ds, num_workers=2, num_workers=4)\n", id="twice"),
        pytest.param("x = DataLoader(each for each in ds)\n", id="a generator without a parenthesis"),
        pytest.param("x = DataLoader(ds, num_workers=(n := 2)); print(n)\n", id="needed elsewhere"),
        pytest.param("def f(): x = DataLoader(ds, num_workers=(yield))\n", id="needed for the function"),
        pytest.param("x = DataLoader(ds\n", id="no end"),
        pytest.param("x = DataLoader(ds)\nprint 1\n", id="Python 2"),
        pytest.param("x = DataLoader(ds)\0\n", id="a null byte"),
        pytest.param("x = DataLoader('\ud800')\n", id="a lone surrogate"),
        pytest.param(f"x = DataLoader(ds); y = {'-' * 100_000}1\n", id="deeply nested"),
    ],
)
def test_what_cannot_be_shown(source: str) -> None:
    assert patched(source, 1, "DataLoader", WORKERS, POSITIONS) is None
    assert patched_all(source, [(1, "DataLoader", WORKERS, POSITIONS)]) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), (1,), 1j, b"", Path(), True.__class__])
def test_a_value_that_is_not_plain_cannot_be_shown(value: object) -> None:
    assert patched("x = f(a=1)\n", 1, "f", {"a": value}) is None


@pytest.mark.parametrize("name", ["a b", "if", "x=1, b", "", "x: int", "\n"])
def test_a_name_that_is_none_cannot_be_shown(name: str) -> None:
    assert patched("x = f(a)\n", 1, "f", {name: 1}) is None


def test_any_line_of_a_call_is_its_line() -> None:
    source = "x = (\n    torch.utils\n    .data.DataLoader(\n        ds,\n    )\n)\n"
    expected = source.replace("ds,\n", "ds,\n        num_workers=8,\n")

    found = [patched(source, line, "DataLoader", WORKERS) for line in range(1, 7)]

    assert found == [None, expected, expected, expected, expected, None]


TWO = "train = DataLoader(\n    a,\n    num_workers=min(\n        1, 2\n    ),\n)\ntest = DataLoader(b)\n"


def test_each_of_two_loaders_has_its_own() -> None:
    assert patched(TWO, 7, "DataLoader", WORKERS) == TWO.replace("(b)", "(b, num_workers=8)")

    both = patched_all(TWO, [(1, "DataLoader", WORKERS, ()), (7, "DataLoader", {"num_workers": 2}, ())])

    assert both == "train = DataLoader(\n    a,\n    num_workers=8,\n)\ntest = DataLoader(b, num_workers=2)\n"
    assert patched_all(TWO, [(7, "DataLoader", {"num_workers": 2}, ()), (1, "DataLoader", WORKERS, ())]) == both


def test_changes_of_one_call_are_joined() -> None:
    changes: list[CallChange] = [
        (7, "DataLoader", {"a": 1, "b": 1}, ()),
        (7, "DataLoader", {"b": -2.5, "dataset": None}, POSITIONS),
    ]

    assert patched_all(TWO, changes) == TWO.replace("(b)", "(None, a=1, b=-2.5)")
    assert patched_all(TWO, changes[::-1]) == TWO.replace("(b)", "(None, b=1, a=1)")


def test_a_call_in_another_is_changed_with_it() -> None:
    source = "x = DDP(\n    Net(1),\n    static=Net(\n        2\n    ),\n)\n"
    inner = (2, "Net", {"size": 5}, ("size",)), (4, "Net", {"wide": True}, ())

    changed = patched_all(source, [(1, "DDP", {"bucket": 50}, ()), *inner])

    assert changed == (
        "x = DDP(\n    Net(5),\n    static=Net(\n        2,\n        wide=True\n    ),\n    bucket=50,\n)\n"
    )
    assert patched_all(source, [(1, "DDP", {"static": False}, ()), *inner]) is None


def test_one_change_that_cannot_be_shown_and_none_is() -> None:
    assert patched_all(TWO, [(7, "DataLoader", WORKERS, ()), (1, "Loader", WORKERS, ())]) is None


# --- any layout ---------------------------------------------------------------------------------------------------

BOOLEANS = st.booleans()
VALUES = st.one_of(
    *(BOOLEANS, st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
)
NAMES = st.sampled_from(["batch_size", "shuffle", "num_workers", "pin_memory", "timeout", "prefetch_factor"])
OLD = st.sampled_from(
    ["1", "(2)", "f(a, b=(1,))", "[\n 1,\n]", "'\u65e5, )'", 'f"{x}"', "lambda a, b=1: a", "x if y else z"]
)
POSITIONAL = st.sampled_from(["ds", "(ds)", "S(\n ds)", "'\U0001f600'"])
GAPS = st.sampled_from(["", " ", "\n    ", "\n\t", "  # a, (comment)\n    ", "\n  # \u00e9 )\n  ", " \\\n  "])


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, str]:
    """What is before a call, the call, and what is after it."""
    keywords = draw(st.lists(st.tuples(NAMES, OLD), unique_by=lambda each: each[0]))
    positional = draw(st.lists(POSITIONAL, max_size=2))
    arguments = [*positional, *(f"{name}={draw(GAPS)}{old}" for name, old in keywords)]
    inside = ",".join(f"{draw(GAPS)}{each}{draw(GAPS)}" for each in arguments)
    end = ("," if bool(arguments) and draw(BOOLEANS) else "") + draw(GAPS)
    before = draw(st.sampled_from(["x = ", "# \u00e9\n\nx = {'\u65e5': [", "if x:\n\ty = g(1, "]))
    after = {"=": "\n", "[": ", 1]}  # )\n\nz = 2", ",": ")\n"}[before.strip()[-1]]
    called = draw(st.sampled_from(["DataLoader", "torch.utils.data.DataLoader"]))
    ends = draw(st.sampled_from(["\n", "\r\n"]))
    before, call, after = (each.replace("\n", ends) for each in (before, f"{called}({inside}{end})", after))
    return before, call, after


def call_of(source: str) -> ast.Call:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return next(call for call in calls if ast.unparse(call.func).endswith("DataLoader"))


def other_tokens(source: str, changed: Collection[str], added: Collection[str]) -> Iterator[str]:
    """What is neither a changed value nor an added argument; without commas and the ends of lines."""
    gone = [each if each.arg in added else each.value for each in call_of(source).keywords if each.arg in changed]
    for token in tokenize.generate_tokens(io.StringIO(source, newline="").readline):
        line, column = token.start[0], len(token.line[: token.start[1]].encode())
        if len(token.line.splitlines()) > 1:  # of several lines: the column is one of the first
            column = len(token.line.splitlines()[0][: token.start[1]].encode())
        inside = any(
            (each.lineno, each.col_offset) <= (line, column) < (each.end_lineno or 0, each.end_col_offset or 0)
            for each in gone
        )
        if not inside and token.string.strip() not in ("", ",", "(", ")"):  # a parenthesis around a value may stay
            yield token.string


@given(calls(), st.dictionaries(NAMES, VALUES))
@example(("x = ", "DataLoader(ds  # a, (comment)\n)", "\n"), BOTH)
def test_any_call_gets_its_values_and_nothing_else_changes(
    parts: tuple[str, str, str], arguments: Mapping[str, object]
) -> None:
    before, call, after = parts
    source = "".join(parts)
    had = {each.arg for each in call_of(source).keywords}

    result = patched(source, before.count("\n") + 1, "DataLoader", arguments)

    assert result is not None
    assert result.startswith(before + call.partition("(")[0] + "(")
    assert result.endswith(f"){after}")
    values = {each.arg: each.value for each in call_of(result).keywords}
    assert {name: repr(ast.literal_eval(values[name])) for name in arguments} == {
        name: repr(value) for name, value in arguments.items()
    }
    added = arguments.keys() - had
    assert list(other_tokens(source, arguments, ())) == list(other_tokens(result, arguments, added))
    assert [*values] == [
        *(each.arg for each in call_of(source).keywords),
        *(each for each in arguments if each in added),
    ]
    assert patched(result, before.count("\n") + 1, "DataLoader", arguments) == result


# --- diffs --------------------------------------------------------------------------------------------------------

PROGRAM = """import torch
from torch.utils.data import DataLoader

dataset = Images("data")
loader = DataLoader(
    dataset,
    batch_size=32,
    num_workers=2,  # as on the laptop
)
model = Net()
optimizer = SGD(model.parameters())

for batch in loader:
    step(batch)
"""

DIFF = """--- a/train.py
+++ b/train.py
@@ -5,7 +5,8 @@
 loader = DataLoader(
     dataset,
     batch_size=32,
-    num_workers=2,  # as on the laptop
+    num_workers=8,  # as on the laptop
+    persistent_workers=True,
 )
 model = Net()
 optimizer = SGD(model.parameters())
"""


def test_the_diff(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)

    assert diff_of(str(program), 5, "DataLoader", BOTH, POSITIONS, shown_as="train.py") == DIFF
    assert diff_of(str(program), 5, "DataLoader", BOTH).startswith(f"--- a{program}\n+++ b{program}\n@@")
    assert diff_of(str(program), 5, "DataLoader", {"num_workers": 2}) == ""
    assert diff_of(str(program), 1, "DataLoader", BOTH) == ""
    assert program.read_text() == PROGRAM


def test_a_diff_counts_lines_as_git_does() -> None:
    assert "@@ -1,2 +1,2 @@\n" in diff_of_source("\f'\u2028'\nx = f()\n", "\f'\u2028'\nx = f(1)\n", "x.py")


def test_the_diff_of_a_last_line_without_an_end() -> None:
    assert diff_of_source("x = f()", "x = f(a=1)", "/x.py") == (
        "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n"
        "-x = f()\n\\ No newline at end of file\n+x = f(a=1)\n\\ No newline at end of file\n"
    )


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("text", [PROGRAM, PROGRAM.replace("\n", "\r\n"), "\f# \u2028\n" + PROGRAM + "\fDataLoader"])
def test_git_applies_the_diff(tmp_path: Path, text: str) -> None:
    program = tmp_path / "train.py"
    program.write_bytes(text.encode())
    line = line_of(text)
    diff = diff_of(str(program), line, "DataLoader", BOTH, shown_as="train.py")

    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True, timeout=60)

    assert program.read_bytes().decode() == patched(text, line, "DataLoader", BOTH)


@pytest.mark.parametrize(
    ("cookie", "encoding"), [("", "utf-8-sig"), ("# coding: latin-1\n", "latin-1"), ("# coding: nothing\n", "latin-1")]
)
def test_a_file_is_read_as_python_reads_it(tmp_path: Path, cookie: str, encoding: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"{cookie}x = f('\u00e9')\n", encoding=encoding)
    diff = diff_of(str(program), 2 if cookie else 1, "f", {"a": 1})

    assert diff.endswith("-x = f('\u00e9')\n+x = f('\u00e9', a=1)\n") is ("nothing" not in cookie)


def test_what_is_no_small_file_gives_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("x = f()\n" + "#" * (1 << 20))
    (tmp_path / "binary").write_bytes(b"x = f()\n\xff")
    (tmp_path / "empty").write_text("")
    places = [tmp_path / name for name in ("fifo", "large", "binary", "empty", "none", "")]

    assert {diff_of(str(each), 1, "f", {"a": 1}) for each in places} == {""}
    assert diff_of("\0", 1, "f", {"a": 1}) == ""
