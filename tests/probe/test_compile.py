"""torch.compile does the same with and without the probe: same graphs, same breaks, same recompiles, same numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment, segment_writer, workers
from gpulaunch.profiler.channel.layout import Hook, StepSource

pytestmark = pytest.mark.torch

COMPILED = str(Path(__file__).with_name("compiled.py"))


def compile_all(backend: str, directory: Path, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, COMPILED, backend],
        env=os.environ
        | {"TORCHINDUCTOR_CACHE_DIR": str(directory), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        | {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        | environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_programs_are_left_as_they_are(backend, tmp_path):
    if backend == "inductor" and not (shutil.which("cc") and shutil.which("g++")):
        pytest.skip("inductor needs a C++ compiler, and there is none here")
    segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    workers.create(str(tmp_path / "workers-0.bin"))
    # Both compile all graphs: shared is only what the C++ compiler makes of a source, by its hash.
    without = compile_all(backend, tmp_path / "cache")
    observed = compile_all(backend, tmp_path / "cache", RANK="0", GPULAUNCH_CHANNEL_DIR=str(tmp_path))
    seen = segment.read(str(tmp_path / "rank-0.bin"))

    for program in ("fullgraph_model", "fullgraph_loss", "fullgraph_collective"):
        assert without[program]["graph_breaks"] == {}
        assert without[program]["graphs"] == 1
    assert without["whole_step"]["graph_breaks"] != {}, "no break: this program shows nothing"
    assert observed == without

    # 80 steps each. Where the optimizer is compiled too, backward ends the steps once the optimizer has been missed.
    assert seen.hooks_unavailable == Hook(0)
    assert seen.microsteps >= 5 * 80 - 1
    assert seen.steps >= 5 * 80 - 4
    assert seen.step_source is StepSource.BACKWARD
    phases = ("data_wait", "forward", "backward", "optimizer", "compile", "other")
    assert min(seen.phase_ns[phase] for phase in phases) > 0
    assert seen.pauses.compiles > 0
