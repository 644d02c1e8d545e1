"""The GPU check, as a part of the suite where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("check.py")


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_every_gpu_check_is_ok(tmp_path: Path) -> None:
    out = tmp_path / "result.json"

    done = subprocess.run([sys.executable, str(CHECK), "--out", str(out)], capture_output=True, text=True, timeout=580)

    result = json.loads(out.read_text())
    if "skipped" in result:
        assert (done.returncode, done.stdout) == (0, f"skipped: {result['skipped']}\n")
        pytest.skip(result["skipped"])
    assert {name: check for name, check in result["checks"].items() if not check["ok"]} == {}
    assert done.returncode == 0, done.stderr
