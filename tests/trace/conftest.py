"""What the tests of traces share."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the client is a module beside this file


@pytest.fixture
def directory(census: None) -> Iterator[Path]:
    """A directory for sockets; pytest's own lie too deep for the 107 bytes of an address."""
    with tempfile.TemporaryDirectory(prefix="t") as path:
        yield Path(path)
