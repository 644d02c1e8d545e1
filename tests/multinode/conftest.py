"""Hosts for a test, and what lies beside this."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what lies beside this, as `hosts`

from hosts import Host, hosts


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3) as three:
        yield three
