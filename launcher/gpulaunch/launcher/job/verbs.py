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
        "doctor": ("[--json]", "what this machine has and lacks"),
        "top": ("[RUN]", "a run in the terminal, while it goes on or afterwards"),
        "report": ("[RUN]", "what was found in a run: what to change, where, what it costs"),
        "trace": ("--steps N", "record what the ranks of a running job do"),
        "compare": ("RUN_A RUN_B", "what changed between two runs, and what of it is noise"),
        "flame": ("[RUN]", "where its time went, as flame graphs"),
        "export": ("[RUN] --out FILE", "what was measured, as JSON lines or Parquet"),
        "runs": ("[prune]", "which runs are stored, their size and age; remove old ones"),
        "chaos": ("FAULT [RANK]", "make a fault on a run that is under way"),
    }
)
"""What it takes and what it does, as `gpulaunch --help` says it, in that order."""
