"""Totals that never fall although their sources are replaced: the ledger.

A rank's segment starts at zero with every attempt, and the CPU time of a dataloader worker is gone when it ends. So
each total is an account: the final values of the sources that are gone, plus the current value of each live source. The
ledger is written beside the segments after every refresh; after a kill the next sidecar loads it, and the totals
continue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add
from pathlib import Path
from typing import Any, cast

from gpulaunch.profiler.files import read_file, write_file

_VERSION = 1


@dataclass
class _Account:
    gone: tuple[int, ...] = ()
    living: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class MonotonicTotals:
    """Accounts by key; every account is a vector of counters that are read together."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def total(self, key: str, sources: Mapping[str, Sequence[int]], *, width: int) -> tuple[int, ...]:
        """Return the totals of an account, given all its live sources.

        Args:
            key: the account.
            sources: name of each live source and its counters. A name must never be reused for another source: put the
                attempt, or the start time of the process, into it.
            width: how many counters the account has.
        """
        account = self._accounts.setdefault(key, _Account())
        for name in [name for name in account.living if name not in sources]:
            account.gone = _add(account.gone, account.living.pop(name))
        for name, counters in sources.items():
            # The kernel's CPU figures have been observed to fall by a tick; a counter must not.
            known = account.living.get(name, ())
            if len(known) == len(counters):  # nearly always, and this is done a hundred times a second
                account.living[name] = tuple(map(max, known, counters))
            else:
                account.living[name] = tuple(max(pair) for pair in zip_longest(known, counters, fillvalue=0))
        total = account.gone
        for counters in account.living.values():
            total = _add(total, counters)
        return _add(total, (0,) * width)[:width]

    def save(self, path: Path) -> None:
        """Write all accounts atomically: a reader sees the old ones or the new ones."""
        accounts = {key: [account.gone, account.living] for key, account in self._accounts.items()}
        write_file(path, [json.dumps({"version": _VERSION, "accounts": accounts}, separators=(",", ":"))])

    def load(self, path: Path) -> bool:
        """Take over the accounts of an earlier sidecar; False if there are none, or they are damaged."""
        try:
            text = read_file(path)
        except OSError:
            return False
        try:
            document: Any = json.loads(text)
            if document["version"] != _VERSION:
                return False
            self._accounts = {str(key): _account(value) for key, value in document["accounts"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        return True


def _add(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    if len(left) == len(right):
        return tuple(map(add, left, right))
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def _account(value: Any) -> _Account:
    gone, living = value
    return _Account(_counters(gone), {str(name): _counters(counters) for name, counters in living.items()})


def _counters(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int for item in cast("list[object]", value)):
        raise ValueError("not a list of integers")
    return tuple(cast("list[int]", value))
