"""Real DDP over gloo, with the profiler and with checkpoints: on a file system that all hosts share, or on each."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from hosts import hosts

from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import Status
from gpulaunch.launcher.checkpoint.manifest import verify
from gpulaunch.launcher.runs.stored import State, stored
from job import Job

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.light]

PROGRAM = Path(__file__).parent / "train_ddp.py"


def test_training_goes_on_from_a_checkpoint_without_a_node_and_again_with_it(tmp_path: Path) -> None:
    """On hosts whose own names mean 127.0.1.1: gloo would take that."""
    with hosts(3, debian_names=True) as three:
        checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
        job = Job(tmp_path, "2:3", "--rdzv-conf", "last_call_timeout=2", *checkpoints, program=PROGRAM)
        job.start(*three)
        job.until_trains("host0", "host1", "host2", within_s=120.0)
        job.until(lambda: job.nodes["host0"].steps()[-1]["step"] > 25, "steps are made and saved")

        cut_s = time.monotonic()
        three[2].cut()
        job.until_trains("host0", "host1", after_s=cut_s)
        without = job.nodes["host0"].steps()[-1]
        assert without["resumed"] >= 10
        healed_s = time.monotonic()
        three[2].heal()
        job.until_trains("host0", "host1", "host2", after_s=healed_s)

        again = job.nodes["host2"].steps()[-1]
        assert again["resumed"] >= without["resumed"]
        assert job.end() == {"host0": 0, "host1": 0, "host2": 0}
        for node in job.nodes.values():
            assert "resuming from" in node.said


def test_rank_0_moves_to_another_host_and_saves_there(tmp_path: Path) -> None:
    with hosts(3) as three:
        run_dir, options = tmp_path / "run", ("--rdzv-conf", "last_call_timeout=2")
        (run_dir / ".nodes").mkdir(parents=True)
        (run_dir / ".nodes" / "0").write_text("host0")  # the directory of the run is that of the node that is lost
        job = Job(tmp_path, "2:3", *options, leader="host1", program=PROGRAM, run_dir=run_dir)
        job.start(*three)
        job.until_trains("host0", "host1", "host2", within_s=120.0)
        job.until(lambda: job.nodes["host0"].steps()[-1]["step"] > 25, "steps are made and saved")

        off_s = time.monotonic()
        three[0].power_off()
        job.until_trains("host1", "host2", after_s=off_s)
        (first,) = (name for name in ("host1", "host2") if job.nodes[name].steps()[-1]["rank"] == 0)
        began = job.nodes[first].steps()[-1]["resumed"]
        job.until(lambda: job.nodes[first].steps()[-1]["step"] > began + 25, "more steps are made and saved")

        del job.nodes["host0"]
        assert job.end() == {"host1": 0, "host2": 0}
        newest = max(path.name for path in (run_dir / "checkpoints").glob("step-*"))
        assert int(newest.removeprefix("step-")) > began + 20
        view = load_run(run_dir)
        assert (view.status, view.attempt, sum(view.restarts.values())) == (Status.FINISHED, 1, 1)
        assert len({rank.rank for rank in view.ranks}) == len(view.ranks) == 3
        assert 0 not in {rank.node for rank in view.ranks if rank.rank < 2}, "host0 is lost"
        assert "report in ./run/report.html" in job.nodes[first].said
        (run,) = stored(str(tmp_path))
        assert run.state is State.FINISHED
        for node in job.nodes.values():
            assert "taken over" not in node.said
            assert "is in use" not in node.said


def test_a_spare_goes_on_from_the_checkpoint_of_another_node_without_a_shared_file_system(tmp_path: Path) -> None:
    """The node that saved first is lost; each has a directory of its own, and the spare's is empty."""
    with hosts(3) as three:
        job = Job(tmp_path, "2", "--replicate", leader="host1", program=PROGRAM)
        job.start(*three[:2])
        job.until_trains("host0", "host1", within_s=120.0)
        job.until(lambda: job.nodes["host0"].steps()[-1]["step"] > 25, "steps are made and saved")
        job.start(three[2])
        job.pause(5.0)

        off_s = time.monotonic()
        three[0].power_off()
        job.until_trains("host1", "host2", after_s=off_s)
        began = job.nodes["host2"].steps()[-1]["resumed"]
        assert began >= 20
        job.until(lambda: job.nodes["host2"].steps()[-1]["step"] > began + 25, "more steps are made and saved")

        del job.nodes["host0"]
        assert job.end() == {"host1": 0, "host2": 0}
        assert f"step {began} was copied from another node to {job.nodes['host2'].run_dir}" in job.nodes["host2"].said
        newest = [max((node.run_dir / "checkpoints").glob("step-*")) for node in job.nodes.values()]
        assert newest[0].name == newest[1].name
        assert int(newest[0].name.removeprefix("step-")) > began + 20
        for each in newest:
            verify(str(each))


def test_all_save_before_a_node_leaves_and_the_others_go_on_from_there(tmp_path: Path) -> None:
    with hosts(3) as three:
        checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
        job = Job(tmp_path, "2:3", "--rdzv-conf", "last_call_timeout=2", *checkpoints, program=PROGRAM)
        job.start(*three)
        job.until_trains("host0", "host1", "host2", within_s=120.0)
        job.until(lambda: job.nodes["host0"].steps()[-1]["step"] > 13, "steps are made and saved")

        asked_s = time.monotonic()
        job.signal("host2", signal.SIGTERM)
        assert job.codes("host2") == {"host2": 75}
        last = job.nodes["host2"].steps()[-1]["step"]
        job.until_trains("host0", "host1", after_s=asked_s)
        job.pause(2.0)

        assert job.nodes["host0"].steps()[-1]["resumed"] in (last, last + 1), "nothing was lost"
        del job.nodes["host2"]
        assert job.end() == {"host0": 0, "host1": 0}
