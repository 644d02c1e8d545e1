"""The parser that library users get: torchrun's own, to the letter."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.compat import torchrun as compat

# The command lines, environments and torchrun's parser as a server come from the tests of our own command line.
_spec = importlib.util.spec_from_file_location("command_lines", Path(__file__).parents[1] / "job" / "test_parse.py")
assert _spec is not None
assert _spec.loader is not None
command_lines = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(command_lines)
torchrun = command_lines.torchrun


def ours(argv: list[str], environ: dict[str, str] | None = None) -> dict[str, Any] | None:
    """As the server answers: the namespace, {"help": True}, or None if the line is refused."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            with mock.patch.dict(os.environ, {**clean, **(environ or {})}, clear=True):
                return vars(compat.parse_args(argv))
        except SystemExit as end:
            return None if end.code else {"help": True}
        except ValueError:
            return None


def as_this_torch(namespace: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what the tests leave out of torch's, and what came with torch 2.14 where an older one is installed."""
    if namespace is not None:
        namespace.pop("print_completion", None)
        if not command_lines.IS_NEW_TORCH:
            namespace.pop("log_line_prefix_template", None)
    return namespace


@pytest.mark.torch
@given(command_lines.COMMAND_LINES)
@example(["--monitor-interval=1e3", "--max-restarts", " 3", "train.py"])
@example(["--nproc", "4", "train.py"])
@example(["--start-method=auto", "train.py"])
@example(["--numa-binding=core-complex", "train.py", "--lr", "1"])
@example([])
def test_every_line_gives_torchruns_namespace_or_none(torchrun: Any, argv: list[str]) -> None:
    theirs = torchrun(argv)

    assert as_this_torch(ours(argv)) == theirs


@pytest.mark.torch
@given(command_lines.environments(), st.lists(command_lines.spelt_option(), max_size=3))
@example({"PET_MAX_RESTARTS": "three"}, [])
@example({"PET_STANDALONE": "yes"}, [])
@example({"PET_START_METHOD": "anything", "PET_NUMA_BINDING": "node"}, [])
def test_pet_variables_are_its_defaults(torchrun: Any, environ: dict[str, str], options: list[list[str]]) -> None:
    argv = [word for option in options for word in option] + ["train.py"]

    assert as_this_torch(ours(argv, environ)) == torchrun(argv, environ)


def test_other_parsers_can_take_over_its_actions() -> None:
    """As torchtune does, which calls the script a recipe."""
    parser = argparse.ArgumentParser()
    for action in compat.get_args_parser()._actions:
        if action.dest == "help":
            continue
        if action.dest == "training_script":
            action.dest = "recipe"
        parser._add_action(action)

    args = parser.parse_args(["--nproc-per-node", "2", "full_finetune", "--config", "x"])

    assert (args.nproc_per_node, args.recipe, args.training_script_args) == ("2", "full_finetune", ["--config", "x"])


def test_it_has_a_help_page() -> None:
    assert "--rdzv-backend" in compat.get_args_parser().format_help()


def test_importing_it_and_parsing_with_it_does_not_import_torch() -> None:
    program = """
import sys
from gpulaunch.compat import torchrun
torchrun.parse_args(["--nproc-per-node", "2", "train.py"])
torchrun.LaunchConfig(1, 1, 2)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_parser_prints_a_completion_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        compat.parse_args(["--print-completion", "bash"])

    assert end.value.code in (0, None)
    assert "--nproc-per-node" in capsys.readouterr().out
