"""The programs of tests/corpus, and what each of them says of itself in comments:

    # ranks: 2                                       how many ranks it wants, if more than one
    # cause: <rule>                                  this line is to be named, by this rule
    # cause: <rule> or <rule>                        or by that one
    # cause: <rule> no-line                          the rule names no line
    # cause: none-yet <what is wrong>                no rule is about it so far

Only the standard library: tests read this, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CORPUS", "NONE_YET", "NO_LINE", "Program", "programs", "read"]

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus"
NONE_YET = "none-yet"
NO_LINE = "no-line"

_CAUSE = re.compile(r"# cause: (?P<rules>[a-z0-9-]+(?: or [a-z0-9-]+)*)(?P<rest>.*)")
_RANKS = re.compile(r"^# ranks: (\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of them."""

    path: Path
    sick: bool
    ranks: int
    rules: frozenset[str]
    """Any of them is right; none for a healthy one."""
    lines: frozenset[int]
    """Any of them is right; none if the rule names no line."""
    missing: str
    """What is wrong with it, if no rule is about that."""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def expected(self) -> str:
        return f"{NONE_YET}: {self.missing}" if self.missing else " or ".join(sorted(self.rules))


def programs(only: str = "*") -> list[Program]:
    """All that fit, the sick ones first."""
    kinds = (CORPUS / "sick", CORPUS / "healthy")
    return [read(path) for kind in kinds for path in sorted(kind.glob(f"{only.removesuffix('.py')}.py"))]


def read(path: Path) -> Program:
    """What its comments say."""
    text = path.read_text()
    rules, lines, missing = set[str](), set[int](), ""
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _CAUSE.search(line)) is None:
            continue
        rest = found["rest"].strip()
        if found["rules"] == NONE_YET:
            missing = rest
        elif rest not in ("", NO_LINE):
            raise ValueError(f"{path.name}:{number}: {rest!r} is no part of a cause")
        rules.update(found["rules"].split(" or "))
        if rest != NO_LINE:
            lines.add(number)
    ranks = _RANKS.search(text)
    return Program(
        path=path,
        sick=path.parent.name == "sick",
        ranks=int(ranks[1]) if ranks else 1,
        rules=frozenset(rules - {NONE_YET}),
        lines=frozenset(lines),
        missing=missing,
    )
