"""A sidecar that stores as fast as it can, until somebody kills it: argv has the channel directory, the time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kept_run import SYNC, state

from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter


def main() -> None:
    keeper = TelemetryWriter(Path(sys.argv[1]))
    at_s = float(sys.argv[2])
    while True:
        at_s += 1.0
        keeper.write_now(state(at_s, attempt=int(at_s) // 500, findings=(SYNC,) if int(at_s) % 3 else (), gpu=True))
        if not keeper.condition.available:
            sys.exit(keeper.condition.reason)
        print(at_s, flush=True)


if __name__ == "__main__":
    main()
