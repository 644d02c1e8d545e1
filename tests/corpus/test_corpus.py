"""What must hold for every program of the corpus. None of them is run: benchmarks/insight.py does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpulaunch.profiler.analysis.rules import RULES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SICK = sorted((HERE / "sick").glob("*.py"))
HEALTHY = sorted((HERE / "healthy").glob("*.py"))


@pytest.fixture(name="load")
def _load(monkeypatch: pytest.MonkeyPatch):
    """Import a benchmark as its neighbours do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def reads_of_environment(tree: ast.AST) -> set[str]:
    """The variables that it reads with os.environ.get."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if ast.unparse(call.func) == "os.environ.get" and isinstance(call.args[0], ast.Constant)
    }


def test_there_are_enough_of_them() -> None:
    assert len(SICK) >= 30
    assert len(HEALTHY) >= 15


@pytest.mark.parametrize("path", [*SICK, *HEALTHY], ids=shown)
def test_a_program_stands_alone_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    docstring = ast.get_docstring(tree) or ""

    compile(text, str(path), "exec")
    assert docstring.splitlines()[0].endswith("."), "what it trains"
    assert '"' in docstring.split("\n\n")[-1], "what a user would complain about, in his words"
    assert "gpulaunch" not in text
    assert imported & {other.stem for other in path.parent.glob("*.py")} == set()
    assert "step_ms" in text


@pytest.mark.parametrize("path", [*SICK, *HEALTHY], ids=shown)
def test_its_cause_is_a_rule_and_its_cure_a_switch(load, path: Path) -> None:
    program = load("_corpus").read(path)
    variables = reads_of_environment(ast.parse(path.read_text()))

    assert "SECONDS" in variables
    assert program.rules <= {rule.id for rule in RULES}
    assert ("CURED" in variables) is program.sick
    assert bool(program.rules or program.missing) is program.sick
    assert not (program.rules and program.missing)
    assert path.read_text().count("CURED") == 0 or program.sick


def test_what_a_program_says_of_itself_is_read(load, tmp_path: Path) -> None:
    read, path = load("_corpus").read, tmp_path / "some.py"

    path.write_text("# ranks: 2\na\nb  # cause: hot-line or straggler\n")
    said = read(path)
    assert (said.ranks, said.rules, said.lines) == (2, {"hot-line", "straggler"}, {3})
    assert said.expected == "hot-line or straggler"

    path.write_text("# cause: straggler no-line\n")
    assert (read(path).rules, read(path).lines, read(path).ranks) == ({"straggler"}, set(), 1)

    path.write_text("x  # cause: none-yet too many doubles\n")
    assert (read(path).rules, read(path).lines, read(path).missing) == (set(), {1}, "too many doubles")

    path.write_text("x  # cause: straggler perhaps\n")
    with pytest.raises(ValueError, match="perhaps"):
        read(path)


def found(rule: str, *, line: int | None = None, ms: float = 0.0, active: bool = True) -> dict[str, Any]:
    """A finding of a report, as far as it is judged."""
    file = "" if line is None else "some.py"
    return {"rule": rule, "file": file, "line": line, "seconds_per_step": ms / 1e3, "active": active}


def ran(*findings: dict[str, Any], step_ms: float = 50.0) -> dict[str, Any]:
    return {"code": 0, "step_ms": step_ms, "findings": list(findings)}


def with_cures(*steps_ms: float) -> dict[str, Any]:
    return {**ran(step_ms=sum(steps_ms) / len(steps_ms)), "steps_ms": list(steps_ms)}


def test_a_program_is_judged_by_its_first_finding_its_line_and_its_seconds(load, tmp_path: Path) -> None:
    judged, read, path = load("insight").judged, load("_corpus").read, tmp_path / "sick" / "some.py"
    path.parent.mkdir()
    path.write_text("a\nb  # cause: hot-line\n")
    cured, program = with_cures(20.0, 20.0), read(path)

    first = judged(program, ran(found("hot-line", line=2, ms=33.0), found("straggler")), cured)
    assert (first["verdict"], first["line_right"]) == ("right first", True)
    assert first["ratio"] == pytest.approx(1.1)

    second = judged(program, ran(found("straggler"), found("hot-line", line=1)), cured)
    assert (second["verdict"], second["line_right"], second["ratio"]) == ("present", False, None)

    gone = judged(program, ran(found("hot-line", line=2, active=False), found("straggler")), cured)
    assert (gone["verdict"], gone["first"], gone["measured_ms"]) == ("missed", "straggler", 30.0)

    path.write_text("a\nb  # cause: none-yet doubles\n")
    unknown = judged(read(path), ran(found("hot-line", line=2, ms=3.0)), cured)
    assert (unknown["verdict"], unknown["line_right"]) == ("missed", True)

    failed = judged(program, {"code": 1, "step_ms": None, "findings": []}, cured)
    assert failed["verdict"] == "failed"


def test_totals_count_what_is_right_present_missed_and_false(load, tmp_path: Path) -> None:
    module, read = load("insight"), load("_corpus").read
    sick, healthy = tmp_path / "sick" / "some.py", tmp_path / "healthy" / "some.py"
    for path, text in ((sick, "b  # cause: hot-line\n"), (healthy, "b\n")):
        path.parent.mkdir()
        path.write_text(text)
    cured = with_cures(18.0, 22.0)
    rows = [
        module.judged(read(sick), ran(found("hot-line", line=1, ms=27.0)), cured),
        module.judged(read(sick), ran(found("straggler")), cured),
        module.judged(read(healthy), ran(), None),
        module.judged(read(healthy), ran(found("gc-pauses", ms=1.0)), None),
    ]

    of = module.totals(rows)

    assert (of["sick"], of["right_first"], of["present"], of["missed"], of["misled"]) == (2, 1, 0, 1, 1)
    assert (of["healthy"], of["false"], of["lines_right"], of["lines"]) == (2, 1, 1, 1)
    assert (of["predictions"], of["within_20_percent"], of["median_error"]) == (1, 1, pytest.approx(0.1))
    assert (of["measured_twice"], of["repeated_within_20_percent"]) == (1, 1)  # 32 and 28 ms
    assert "right first 1 of 2" in module.summary(of)
    assert module.short_of(rows, 0.5) == []
    assert module.short_of([*rows, rows[1]], 0.5) == ["sick"]
    assert module.short_of(rows[:3], 0.6) == ["sick"]
    assert module.short_of([], 0.6) == []
    assert module.table(rows).count("\n") == len(rows) + 1


def test_sick_programs_count_for_a_demand_at_the_pace_on_record_and_if_they_are_enough(load) -> None:
    module = load("insight")
    sick = [{"program": f"sick/{number}", "sick_ms": 10.0} for number in range(module.ENOUGH + 1)]
    healthy = [{"program": "healthy/a", "sick_ms": 90.0}]
    record = {row["program"]: {**row, "sick_ms": 10.0} for row in sick[1:] + healthy}
    slow = {**sick[1], "sick_ms": 10.0 * module.SLOWER + 1}

    assert module.telling(healthy + sick, record) == healthy + sick
    assert module.telling([*healthy, *sick[:1], slow, *sick[2:]], record) == [*healthy, *sick[:1], *sick[2:]]
    assert module.telling([*healthy, slow, *sick[2:]], record) == healthy
