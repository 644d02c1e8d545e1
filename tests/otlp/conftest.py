"""The node that tests/prometheus exports, here too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "node_of_prometheus", Path(__file__).parents[1] / "prometheus/conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

node = _module.node
hostile = _module.hostile
with_texts = _module.with_texts
empty_node = _module.empty_node
