"""Expressions of PromQL with the unit of what they give and the labels of its series, and what is made of them.

Units are carried along: the rate of seconds is a share, bytes by seconds are a throughput; the unit that a panel shows
is never written by hand. What does not go together is a `QueryError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

__all__ = [
    "BASE",
    "Expr",
    "QueryError",
    "Unit",
    "grouped",
    "highest",
    "known",
    "lowest",
    "mean",
    "median",
    "number",
    "product",
    "since",
    "spread",
    "top",
    "total",
]

Unit = tuple[tuple[str, int], ...]
"""Base units and their powers, sorted: (("B", 1), ("s", -1)) is bytes by seconds."""

BASE: Final[Mapping[str, Unit]] = {
    "seconds": (("s", 1),),
    "bytes": (("B", 1),),
    "ratio": (),
    "hertz": (("Hz", 1),),
    "watts": (("W", 1),),
    "celsius": (("C", 1),),
    "joules": (("W", 1), ("s", 1)),
    "": (("n", 1),),  # a count
}
_IN_GRAFANA: Final[Mapping[Unit, str]] = {
    (): "percentunit",
    (("s", 1),): "s",
    (("n", 1),): "short",
    (("n", 1), ("s", -1)): "suffix: /s",
    (("B", 1),): "bytes",
    (("B", 1), ("s", -1)): "Bps",
    (("Hz", 1),): "hertz",
    (("W", 1),): "watt",
    (("C", 1),): "celsius",
    (("W", 1), ("s", 1)): "joule",
}


class QueryError(ValueError):
    """The expression cannot be what was meant."""


@dataclass(frozen=True, kw_only=True)
class Expr:
    """An expression, the unit of what it gives, and the labels that its series have."""

    text: str
    unit: Unit
    labels: frozenset[str]
    compound: bool = False
    """It has an operator that others could bind closer than."""
    is_number: bool = False

    @property
    def grafana_unit(self) -> str:
        """The id of Grafana's unit."""
        try:
            return _IN_GRAFANA[self.unit]
        except KeyError:
            raise QueryError(f"no unit of Grafana for {self.unit}: {self.text}") from None

    def __truediv__(self, other: Expr) -> Expr:
        """Divide series by those with the same labels, or by a number."""
        return self._with(other, "/", product(self.unit, other.unit, -1))

    def each(self, things: Expr) -> Expr:
        """Divide by a count of things: the seconds of a step are seconds, the bytes of a batch are bytes."""
        unit = product(product(self.unit, things.unit, -1), BASE[""], 1)
        return self._with(things, "/", unit)

    def __sub__(self, other: Expr) -> Expr:
        """Take series from those with the same labels, or from a number."""
        self._same_unit(other)
        return self._with(other, "-", self.unit)

    def __gt__(self, limit: float) -> Expr:
        """Keep the series above a limit."""
        return self._compound(f"{self.operand} > {limit:g}")

    def __le__(self, limit: float) -> Expr:
        """Keep the series that are not above a limit."""
        return self._compound(f"{self.operand} <= {limit:g}")

    def over(self, whole: Expr) -> Expr:
        """Divide every series by the one series without labels: a share of a whole."""
        of_all = self._compound(f"{self.operand} / on () group_left () {whole.alone.operand}")
        return replace(of_all, unit=product(self.unit, whole.unit, -1))

    def each_of_all(self, things: Expr) -> Expr:
        """Divide every series by one count of things, as `each` does."""
        return replace(self.over(things), unit=self.each(replace(things, is_number=True)).unit)

    def above(self, one: Expr) -> Expr:
        """Take the one series without labels from every series."""
        self._same_unit(one)
        return self._compound(f"{self.operand} - on () group_left () {one.alone.operand}")

    def below(self, one: Expr) -> Expr:
        """Take every series from the one series without labels."""
        self._same_unit(one)
        return self._compound(f"{one.alone.operand} - on () group_right () {self.operand}")

    def or_zero(self) -> Expr:
        """Give 0 where there is no series: "none" is an answer, where "no data" would not be."""
        return self._compound(f"{self.alone.operand} or vector(0)")

    @property
    def alone(self) -> Expr:
        """This, if it is one series without labels."""
        if self.labels:
            raise QueryError(f"this has labels {sorted(self.labels)}: {self.text}")
        return self

    @property
    def operand(self) -> str:
        """The text as a part of another one."""
        return f"({self.text})" if self.compound else self.text

    def _compound(self, text: str) -> Expr:
        return replace(self, text=text, compound=True)

    def _same_unit(self, other: Expr) -> None:
        if self.unit != other.unit:
            raise QueryError(f"{self.unit} and {other.unit} do not go together: {self.text}, {other.text}")

    def _with(self, other: Expr, sign: str, unit: Unit) -> Expr:
        if not self.is_number and not other.is_number and self.labels != other.labels:
            raise QueryError(f"{sorted(self.labels)} do not match {sorted(other.labels)}: {self.text}, {other.text}")
        text = f"{self.operand} {sign} {other.operand}"
        return Expr(text=text, unit=unit, labels=self.labels | other.labels, compound=True)


def total(of: Expr, /, *by: str) -> Expr:
    """Add up."""
    return _aggregate("sum", of, by)


def highest(of: Expr, /, *by: str) -> Expr:
    """Take the highest. By rank this is also what makes one series of a rank that is scraped twice."""
    return _aggregate("max", of, by)


def lowest(of: Expr, /, *by: str) -> Expr:
    """Take the lowest."""
    return _aggregate("min", of, by)


def mean(of: Expr, /, *by: str) -> Expr:
    """Take the mean."""
    return _aggregate("avg", of, by)


def number(of: Expr, /, *by: str) -> Expr:
    """Count the series."""
    return Expr(text=_aggregate("count", of, by).text, unit=BASE[""], labels=frozenset(by))


def median(of: Expr, /) -> Expr:
    """Take the median of all series."""
    return Expr(text=f"quantile(0.5, {of.text})", unit=of.unit, labels=frozenset())


def top(count: int, of: Expr, /) -> Expr:
    """Keep the highest series."""
    return Expr(text=f"topk({count}, {of.text})", unit=of.unit, labels=of.labels)


def spread(of: Expr, /) -> tuple[tuple[Expr, str], ...]:
    """Three lines for any number of ranks: the highest, the median, the lowest."""
    return (highest(of), "highest"), (median(of), "median"), (lowest(of), "lowest")


def since(of: Expr, /) -> Expr:
    """How long ago a Unix time is. What a page says is a moment younger than the scrape: that is no time ago."""
    if of.unit != BASE["seconds"]:
        raise QueryError(f"no time: {of.text}")
    return Expr(text=f"clamp_min(time() - {of.operand}, 0)", unit=of.unit, labels=of.labels)


def _aggregate(function: str, of: Expr, by: tuple[str, ...]) -> Expr:
    known(by, of.labels)
    return Expr(text=f"{function}{grouped(by)} ({of.text})", unit=of.unit, labels=frozenset(by))


def grouped(by: tuple[str, ...]) -> str:
    """Give the clause that keeps these labels."""
    return f" by ({', '.join(by)})" if by else ""


def known(by: tuple[str, ...], labels: frozenset[str]) -> None:
    """Raise QueryError if one of `by` is not among the labels."""
    if unknown := set(by) - labels:
        raise QueryError(f"no label {sorted(unknown)} among {sorted(labels)}")


def product(one: Unit, other: Unit, power: int) -> Unit:
    """Give the unit of one thing by another one to that power: -1 divides."""
    powers = dict(one)
    for base, exponent in other:
        powers[base] = powers.get(base, 0) + power * exponent
    return tuple(sorted((base, exponent) for base, exponent in powers.items() if exponent))
