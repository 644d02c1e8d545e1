"""The subcommands: as the first word they select another action than running a program.

A verb is its line here and its module, `cli/VERB.py`, with `words()` (the parser, also for shell completion) and
`run(argv)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERBS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "doctor": ("[--json]", "check this machine"),
        "top": ("[RUN]", "show an active or finished run in the terminal"),
        "report": ("[RUN]", "show the findings of a run: what to change, where, and the cost"),
        "tune": ("PROGRAM | RUN", "try changes of a job in short trials; measure what each gains"),
        "trace": ("--steps N", "record the operations of a running job"),
        "compare": ("RUN_A RUN_B", "compare two runs"),
        "flame": ("[RUN]", "draw flame graphs of a run"),
        "export": ("[RUN] --out FILE", "export all measurements as JSON lines or Parquet"),
        "runs": ("[prune]", "list stored runs with size and age; remove old ones"),
        "init": ("slurm PROGRAM", "write a batch script for Slurm"),
        "chaos": ("FAULT [RANK]", "inject a fault into an active run"),
    }
)
"""What it takes and what it does, as `gpulaunch --help` says it, in that order."""
