"""What has to be installed besides is told by its right name, and nothing that needs it is said to need nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NOT_FOR_USERS = {"examples", "test"}


def test_the_readme_names_every_extra_where_it_says_how_to_install() -> None:
    told = (ROOT / "README.md").read_text().partition("\n## Your own script\n")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)) == EXTRAS.keys() - NOT_FOR_USERS


def test_what_the_readme_counts_on_is_installed_by_make() -> None:
    """It says that the terminal view and the page are there after `make demo`."""
    (installed,) = re.findall(
        r"\$\(VENV\)/\.examples:.*\n\t\$\(PIP\) .*-e '\.\[([\w,]+)\]'\n", (ROOT / "Makefile").read_text()
    )

    assert {"top", "web"} <= set(installed.split(","))


@pytest.mark.parametrize("folder", ["docs", "launcher", "profiler", "exporters", "."])
def test_no_extra_is_advised_that_does_not_exist(folder: str) -> None:
    files = (ROOT / folder).rglob("*") if folder != "." else [ROOT / "README.md"]
    text = "".join(path.read_text() for path in files if path.suffix in (".py", ".md", ".html", ".js"))
    advised = {name for names in re.findall(r"gpulaunch\[([\w,]+)\]", text) for name in names.split(",")}

    assert advised - EXTRAS.keys() == set()
