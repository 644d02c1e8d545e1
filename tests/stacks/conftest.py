"""What the tests of stacks share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what holds a file against its format is a module beside this one
