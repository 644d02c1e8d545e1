"""The node that tests/prometheus exports, and the programs that read it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from needed import program

_spec = importlib.util.spec_from_file_location(
    "node_of_prometheus", Path(__file__).parents[1] / "prometheus/conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

node = _module.node
empty_node = _module.empty_node


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own tool; Debian's package prometheus has both of them."""
    return program("promtool", package="prometheus")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return program("prometheus", package="prometheus")
