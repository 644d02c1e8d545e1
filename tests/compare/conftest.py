"""The tests of the comparison share the runs that lie beside them, and those of the view and the store."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("store", "view", "compare"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
