"""The tests of bad luck share the node that lies beside them."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bad_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with nothing on it yet."""
    directory = tmp_path / "channel"
    directory.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(Node(directory, listener)) as node:
        yield node
