"""LaunchConfig and what a namespace means, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulaunch.compat import torchrun
from gpulaunch.compat.config import options_of
from gpulaunch.compat.torchrun import LaunchConfig


@pytest.mark.torch
def test_the_configuration_is_torchs(call: Callable[[str], str]) -> None:
    """Fields, order, defaults; and what config_from_args makes of a command line."""
    call("""
        import dataclasses, os, sys
        from torch.distributed import run as torchs
        from torch.distributed.launcher import api
        from gpulaunch.compat import torchrun as ours

        os.environ.pop("PET_START_METHOD")
        os.environ["OMP_NUM_THREADS"] = "1"

        def as_dict(config):
            values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
            logs = values.pop("logs_specs")
            return values, type(logs), vars(logs) | {"_root_log_dir": None}

        theirs, mine = api.LaunchConfig(1, 2, 4), ours.LaunchConfig(1, 2, 4)
        assert [f.name for f in dataclasses.fields(mine)] == [f.name for f in dataclasses.fields(theirs)]
        mine.logs_specs = theirs.logs_specs
        assert as_dict(mine) == as_dict(theirs)

        for line in (
            "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id 7 --rdzv-conf timeout=5,a=b x.py --y",
            "--nnodes 2 --node-rank 1 --master-addr h --master-port 5 -r 3 -t 0:1,1:2 --local-ranks-filter 0,1 -m pkg",
            "--nnodes 1:3 --rdzv-backend etcd --rdzv-endpoint e:1 --no-python ls -l",
            "--numa-binding node --master-port 1 --role x --max-restarts 2 --shutdown-timeout 3 train.py",
            "--signals-to-handle SIGTERM --duplicate-stdout-filters a,b --virtual-local-rank --master-port 1 train.py",
        ):
            theirs, mine = (run.config_from_args(run.parse_args(line.split())) for run in (torchs, ours))
            assert as_dict(mine[0]) == as_dict(theirs[0]), line
            assert mine[1:] == theirs[1:], line

        args = "--run-path --master-port 1 /x/train.py --y".split()
        theirs, mine = (run.config_from_args(run.parse_args(args)) for run in (torchs, ours))
        assert (mine[1].__name__, mine[2]) == (theirs[1].__name__, theirs[2])

        # The logs specs of torch's making are understood.
        specs = api.DefaultLogsSpecs(
            log_dir="logs", redirects=torchs.Std.OUT, tee={1: torchs.Std.ALL}, local_ranks_filter={2, 0}
        )
        from gpulaunch.compat.config import options_of
        options = options_of(ours.LaunchConfig(1, 1, 2, logs_specs=specs))
        wanted = {"log_dir": "logs", "redirects": "1", "tee": "1:3", "local_ranks_filter": "0,2"}
        assert {name: options[name] for name in wanted} == wanted

        class Own(api.DefaultLogsSpecs):
            def reify(self, envs): ...
        try:
            options_of(ours.LaunchConfig(1, 1, 2, logs_specs=Own()))
        except ValueError as err:
            assert "__main__.Own decides itself where output goes" in str(err), err
        else:
            raise AssertionError("accepted a LogsSpecs that it cannot honour")
    """)


def test_a_negative_shutdown_timeout_is_refused_and_the_default_comes_from_torchs_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")

    assert LaunchConfig(1, 1, 1).shutdown_timeout == 7
    with pytest.raises(ValueError, match="must be non-negative, got -1"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)


def test_one_node_needs_no_rendezvous_whatever_its_backend() -> None:
    for backend in ("etcd", "c10d", "zeus"):
        options = options_of(LaunchConfig(1, 1, 2, rdzv_backend=backend, rdzv_endpoint="nowhere:1"))

        assert (options["rdzv_backend"], options["rdzv_endpoint"]) == ("c10d", "")


def test_each_of_several_nodes_needs_its_rank() -> None:
    config = LaunchConfig(2, 2, 1, rdzv_backend="static", rdzv_endpoint="h:1")

    with pytest.raises(ValueError, match='no "rank"'):
        options_of(config)
    config.rdzv_configs["rank"] = "1"
    assert options_of(config)["node_rank"] == 1


def test_a_timeout_that_is_no_number_is_told_as_on_the_command_line() -> None:
    config = LaunchConfig(1, 1, 1, rdzv_configs={"timeout": "x"})

    with pytest.raises(ValueError, match=r"rdzv-conf: timeout: expected a whole number of seconds, got 'x'"):
        torchrun.elastic_launch(config, "true")()


def test_unknown_objects_for_logs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a builtins\.dict decides itself"):
        torchrun.elastic_launch(LaunchConfig(1, 1, 1, logs_specs={}), "true")()


@pytest.mark.parametrize(
    ("config", "entrypoint", "complaint"),
    [
        (LaunchConfig(1, 2, 1), "true", "2 nodes need a place to meet"),
        (LaunchConfig(2, 2, 1, rdzv_backend="c10d"), "true", "need a place to meet"),
        (LaunchConfig(1, 1, 0), "true", "at least 1 rank"),
        (LaunchConfig(1, 1, 1), "no-such-command", "no-such-command: not found in PATH"),
        (LaunchConfig(1, 1, 1), None, "the entrypoint is None"),
        (LaunchConfig(1, 1, 1, rdzv_backend="static", rdzv_endpoint="h"), "true", "names no port"),
    ],
)
def test_a_job_that_cannot_be_is_a_value_error(config: LaunchConfig, entrypoint: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        torchrun.elastic_launch(config, entrypoint)()


def test_a_health_check_server_is_refused() -> None:
    with pytest.raises(ValueError, match="health_check_server is not supported"):
        torchrun.elastic_launch(LaunchConfig(1, 1, 1), "true", health_check_server=object())()
