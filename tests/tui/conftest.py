"""The tests of the terminal view share the views beside them and the runs on disk of the view's tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "view"), str(TESTS / "store")]
