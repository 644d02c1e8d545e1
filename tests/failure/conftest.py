"""Makers of ends and errors, as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulaunch.launcher.failure.ends import RankEnd
from gpulaunch.launcher.failure.errors import RankError
from rank_ends import echo_end, rank_end, rank_error


@pytest.fixture(scope="session")
def make_error() -> Callable[..., RankError]:
    return rank_error


@pytest.fixture(scope="session")
def make_end() -> Callable[..., RankEnd]:
    return rank_end


@pytest.fixture(scope="session")
def make_echo() -> Callable[..., RankEnd]:
    return echo_end
