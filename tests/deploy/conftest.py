"""The node that tests/prometheus exports, and the programs that read it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

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
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _program("prometheus")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is required in CI"
        pytest.skip(f"no {name} (Debian's package prometheus)")
    return found
