"""The documents say what the program has: every option, every exit code; nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.channel.layout import PHASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# Options of our verbs and of the examples, and those of other programs that the documents mention.
ELSEWHERE = {
    *(
        "--help",
        "--version",
        "--print-completion",
        "--epochs",
        "--steps",
        "--require-accuracy",
        "--out",
        "--extra-index-url",
    ),
    *("--use-env", "--local-rank", "--ckpt"),
    *("--kill-on-bad-exit", "--signal", "--ntasks-per-node", "--pty", "--no-kill", "--wait", "--label"),  # of Slurm
    *("--gres", "--gpu-bind", "--gpus-per-node", "--gpus-per-task", "--cpus-per-task", "--account", "--partition"),
    *("--nodes", "--min-nodes", "--image", "--out", "--from-literal"),  # of Slurm, gpulaunch init and kubectl
    *("--duration", "--rank", "--what", "--again"),  # of gpulaunch trace
    *("--format", "--every"),  # of gpulaunch export
    *("--once", "--json"),  # of gpulaunch top
    *("--budget", "--allow-numerics", "--in-place", "--apply"),  # of gpulaunch tune
    *("--keep", "--older", "--checkpoints"),  # of gpulaunch runs
    "--go-on",  # of benchmarks/overhead.py
    *("--build", "--file", "--profile", "--shm-size"),  # of docker compose, and of docker run
    *("--query-gpu", "--cpunodebind"),  # of nvidia-smi and numactl
    *("--config", "--storage"),  # of Prometheus: what is behind a dot is not read
}


def test_every_option_is_in_the_table_for_people_who_come_from_torchrun() -> None:
    table = (DOCS / "from-torchrun.md").read_text()

    assert [option.name for option in OPTIONS if not re.search(rf"--{option.name}\b(?!-)", table)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_an_option_that_does_not_exist(page: Path) -> None:
    known = {string for option in OPTIONS for string in option.option_strings} | ELSEWHERE
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", page.read_text()))

    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    missing = [link for link in links if link and "://" not in link and not (page.parent / link).exists()]

    assert missing == []


def test_the_profiling_guide_has_every_phase_and_names_no_rule_that_does_not_exist() -> None:
    guide = (DOCS / "profiling.md").read_text()
    rules = {rule.id for rule in RULES}

    assert [phase for phase in PHASES if f"| `{phase}` |" not in guide] == []
    assert set(re.findall(r"findings\.md#([a-z0-9-]+)", guide)) <= rules
    assert set(re.findall(r"`((?:[a-z0-9]+-)+[a-z0-9]+)`", guide)) <= rules
