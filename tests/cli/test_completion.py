"""--print-completion, in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulaunch.launcher.cli import completion
from gpulaunch.launcher.cli import main as entry
from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.verbs import VERBS


def completed(tmp_path: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    (tmp_path / "script").write_text(completion.completion("bash"))
    line = " ".join(f"'{word}'" for word in ("gpulaunch", *words))
    program = f"""
        source ./script
        COMP_WORDS=({line}); COMP_CWORD={len(words)}
        _shtab_gpulaunch gpulaunch
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_bash_offers_options_verbs_and_what_a_verb_takes(tmp_path: Path) -> None:
    assert completed(tmp_path, "--nproc") == {"--nproc", "--nproc-per-node"}
    assert completed(tmp_path, "comp") == {"compare"}
    assert completed(tmp_path, "chaos", "kill") >= {"kill-rank"}
    assert completed(tmp_path, "export", "--form") == {"--format"}
    assert completed(tmp_path, "export", "--format", "p") == {"parquet"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_option_and_verb_is_in_every_shells_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--print-completion", shell]) == 0

    script = capsys.readouterr().out
    missing = [name for name in (*VERBS, *(option.name for option in OPTIONS)) if name not in script]
    assert missing == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_can_read_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    script = completion.completion(shell)

    read = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60)

    assert (read.returncode, read.stdout, read.stderr) == (0, "", "")


def test_another_shell_and_a_missing_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'bsh' is not one of bash, zsh, tcsh; did you mean bash"):
        completion.completion("bsh")
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(UsageError, match="needs the package shtab: pip install"):
        completion.completion("zsh")
