"""The tests of the view share the runs that lie beside them and beside those of the store."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parent))
