"""The tests of the report share the runs that lie beside those of the view and the store."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("store", "view", "report"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
