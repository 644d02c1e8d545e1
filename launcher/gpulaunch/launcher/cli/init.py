"""`gpulaunch init`: write the file that a job manager wants, or the token that the nodes of a job share."""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
import sys
from collections.abc import Sequence

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, count, wants_help
from gpulaunch.launcher.job.options import UsageError

_DESCRIPTION = """\
Writes what a job of several nodes needs, to stdout or into a new FILE.
slurm       a batch script: one task for each node, a signal before the time limit, a requeue (docs/slurm.md)
kubernetes  a manifest: an indexed Job, its Service and NetworkPolicy (docs/many-nodes.md)
token       a secret for --token-file, which only its owner can read
"""
_EPILOG = "Exit code 0 when it was written, 2 for wrong words or a FILE that is there already."
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
"""What --time of sbatch takes."""
_MEMORY = re.compile(r"\d+([KMGTPE]i?)?", re.IGNORECASE)
_TOKEN_BYTES = 32
_ONLY = {"slurm": ("time",), "kubernetes": ("image", "memory"), "token": ()}
"""The options that only one of them has."""


def words(*, has_program: bool = True) -> VerbParser:
    """The argument parser, also used for shell completion; a token is not for a program."""
    parser = VerbParser("init")
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=tuple(_ONLY), help="what to write")
    parser.add_argument(
        "program",
        nargs=argparse.PARSER if has_program else "*",
        metavar="PROGRAM",
        help="what to run, and its arguments",
    )
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="nodes (default 1)")
    parser.add_argument("--min-nodes", type=count, metavar="N", help="go on with so many when nodes are lost")
    parser.add_argument("--gpus", type=_number, default=8, metavar="N", help="GPUs of a node (default 8), or 0")
    parser.add_argument("--cpus", type=count, metavar="N", help="cores of a node (default 8 for each GPU)")
    parser.add_argument("--name", help="of the job (default: the program's)")
    parser.add_argument("--time", type=_time, help="Slurm: time limit, as sbatch takes it (default 24:00:00)")
    parser.add_argument("--image", help="Kubernetes: the container image (default NAME:latest)")
    parser.add_argument(
        "--memory", type=_memory, metavar="SIZE", help="Kubernetes: of a node (default 64Gi for each GPU)"
    )
    parser.add_argument("--out", metavar="FILE", help="write it there (default: stdout)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Write it, and return the exit code."""
    parser = words(has_program=list(argv[:1]) != ["token"])
    if not argv or wants_help(argv):
        answer(parser.format_help())
        return 0
    options = parser.read(argv)
    text = _text(options)
    if options.out is None:
        answer(text)
        return 0
    mode = 0o600 if options.what == "token" else 0o666
    try:
        descriptor = os.open(options.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as err:
        raise UsageError(f"init: cannot write {options.out}: {err.strerror}") from None
    print(f"wrote {options.out}; {_next(options)}", file=sys.stderr)
    return 0


def _next(options: argparse.Namespace) -> str:
    """What to do with the file."""
    file = shlex.quote(options.out)
    if options.what == "slurm":
        return f"submit it: sbatch {file}"
    if options.what == "kubernetes":
        return f"create the secret that its first lines name, then: kubectl apply -f {file}"
    return f"copy it to every node, and give --token-file {file} there"


def _text(options: argparse.Namespace) -> str:
    """Raises UsageError."""
    for what, theirs in _ONLY.items():
        for option in theirs:
            if what != options.what and getattr(options, option) is not None:
                raise UsageError(f"init: --{option} is for {what}")
    program: list[str] = options.program
    if options.what == "token":
        if program:
            raise UsageError(f"init: a token is not for a program: {program[0]}; --out FILE says where to write it")
        return base64.b64encode(os.urandom(_TOKEN_BYTES)).decode() + "\n"
    least: int = options.min_nodes or options.nodes
    if least > options.nodes:
        raise UsageError(f"init: --min-nodes {least} is more than --nodes {options.nodes}")
    stem = os.path.splitext(os.path.basename(program[0]))[0] or "train"
    cpus: int = options.cpus or 8 * (options.gpus or 1)
    if options.what == "slurm":
        from gpulaunch.launcher.cli import init_slurm

        return init_slurm.script(
            program,
            name=options.name or stem,
            nodes=options.nodes,
            min_nodes=least,
            gpus=options.gpus,
            cpus=cpus,
            time=options.time or "24:00:00",
        )
    from gpulaunch.launcher.cli import init_kubernetes

    name: str = options.name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return init_kubernetes.manifest(
        program,
        name=name,
        image=options.image or f"{name}:latest",
        nodes=options.nodes,
        min_nodes=least,
        gpus=options.gpus,
        cpus=cpus,
        memory=options.memory or f"{64 * (options.gpus or 1)}Gi",
    )


def _number(text: str) -> int:
    return 0 if text == "0" else count(text)


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a time as for sbatch, such as 90, 24:00:00 or 2-12, got {text!r}")
    return text


def _memory(text: str) -> str:
    if not _MEMORY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a size as Kubernetes writes it, such as 64Gi, got {text!r}")
    return text
