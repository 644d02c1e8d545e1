"""Write the dashboards: `python deploy/grafana/generate.py`; with `--check`, only say whether they are up to date.

They are made from the packages of `source`, and checked against the catalogue of metrics while they are made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from source.cost import cost  # noqa: E402 - it lies beside this file, which is no package
from source.dataloader import dataloader  # noqa: E402
from source.gpus import gpus  # noqa: E402
from source.memory import memory  # noqa: E402
from source.overview import overview  # noqa: E402
from source.ranks import ranks  # noqa: E402
from source.recovery import recovery  # noqa: E402
from source.transfer import transfer  # noqa: E402


def dashboards() -> dict[str, dict[str, Any]]:
    """Make them all, by the names of their files."""
    made = [overview(), ranks(), dataloader(), transfer(), memory(), gpus(), recovery(), cost()]
    return {f"{each['uid']}.json": each for each in made}


def main() -> int:
    """Write what is not up to date, or say so."""
    parser = argparse.ArgumentParser(description="Write Grafana dashboards for gpulaunch.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")
    parser.add_argument("--out", type=Path, default=HERE / "dashboards", help="where they are (default: %(default)s)")
    options = parser.parse_args()
    wanted = {name: json.dumps(each, indent=1) + "\n" for name, each in dashboards().items()}
    out: Path = options.out
    there = {path.name: path.read_text() for path in out.glob("*.json")}
    stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    for name in stale:
        sys.stdout.write(f"{'out of date' if options.check else 'written'}: {name}\n")
        if options.check:
            continue
        if name in wanted:
            (out / name).write_text(wanted[name])
        else:
            (out / name).unlink()
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
