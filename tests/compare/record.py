"""Record a run of `programs/steps.py` beside the others.

    python tests/compare/record.py NAME [--seconds 45] [--late-ms 20]

What it says of the machine it ran on is how crowded the cores were, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sysconfig
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from gpulaunch.exporters.report.crowding import crowding_of
from gpulaunch.exporters.view.as_json import to_json
from gpulaunch.exporters.view.load import load_run

HERE = Path(__file__).parent
PROGRAM = "tests/compare/programs/steps.py"
_ABOUT = f"{PROGRAM}, one rank, on two cores that others used meanwhile, more or less"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--seconds", default="45")
    parser.add_argument("--late-ms", default="20")
    asked = parser.parse_args()
    args = ["--seconds", asked.seconds, "--late-ms", asked.late_ms]
    with tempfile.TemporaryDirectory() as directory:
        command = [f"{sysconfig.get_path('scripts')}/gpulaunch", "--nproc", "1", "--job-dir", directory, PROGRAM, *args]
        subprocess.run(command, cwd=HERE.parents[1], check=True)
        view = load_run(directory)
    crowding = crowding_of(view)
    assert crowding is not None, "this kernel does not tell who waited for the cores (PSI)"
    nodes = tuple(replace(node, host="node", cpu_pressure_ratio=(), cores_used=()) for node in view.nodes)
    shown = replace(
        view, run_dir=f"runs/{asked.name}", name="steps", command=("gpulaunch", PROGRAM, *args), nodes=nodes, events=()
    )
    content = {
        "about": _ABOUT,
        "job": {"program": {"args": args}},
        "crowding": {name: round(value, 4) for name, value in asdict(crowding).items()},
        "view": to_json(shown),
    }
    path = HERE / "recorded" / f"{asked.name}.json"
    path.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    print(f"{path}: somebody waited for a core for {crowding.pressure_ratio:.0%} of the time")


if __name__ == "__main__":
    main()
