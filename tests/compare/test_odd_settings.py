"""What a job.json may say and nobody can compute with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_on_disk import begin

from gpulaunch.launcher.cli import compare


def test_the_comparison_is_json_whatever_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("a", "1e999"), ("b", "NaN")):
        begin(tmp_path / name)
        deep = "[" * 900 + "]" * 900
        (tmp_path / name / "job.json").write_text(
            f'{{"name": "{name}", "options": {{"rate": {rate}, "seed-{name}": {deep}}}}}'
        )

    assert compare.run([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0

    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert {row["name"] for row in said["settings"]} == {"options.seed-a", "options.seed-b"}
