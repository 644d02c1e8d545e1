"""Programs of the machine's that a test cannot do without."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["program"]


def program(*names: str, package: str) -> str:
    """Give the path of the first of these that is there; `package`: Debian's that has it. CI has all of them."""
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    assert not os.environ.get("CI"), f"{names[0]} is required in CI"
    pytest.skip(f"no {names[0]} (Debian's package {package})")
