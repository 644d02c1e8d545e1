"""elastic_launch: functions and commands on all ranks, return values, failures."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.compat import function_call
from gpulaunch.compat.config import LogSettings
from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch, launch_agent
from ports import free_port

# --- functions ----------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_ranks_sum_over_gloo_and_their_results_come_back(call: Callable[[str], str]) -> None:
    """The whole thing as a user has it: ranks forked, a static port, a function of the main file."""
    printed = call(f"""
        import os, sys
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

        def total(start, label):
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            value = torch.tensor(start + int(os.environ["RANK"]))
            dist.all_reduce(value)
            dist.destroy_process_group()
            return value.item(), label, os.environ["MASTER_PORT"]

        if __name__ == "__main__":
            del os.environ["PET_START_METHOD"]
            config = LaunchConfig(1, 1, 2, rdzv_backend="static", rdzv_endpoint="127.0.0.1:{(port := free_port())}")
            print(elastic_launch(config, total)(10, "rank ${{local_rank}}"))
            assert "torch" not in sys.modules
    """)

    assert printed.endswith(f"{{0: (21, 'rank 0', '{port}'), 1: (21, 'rank 1', '{port}')}}\n")


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.torch
def test_a_rank_is_like_a_spawned_child_of_the_caller(
    call: Callable[[str], str], how: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "fork":
        monkeypatch.delenv("PET_START_METHOD")
    (here / "beside").mkdir()
    (here / "beside" / "helper.py").write_text("def twice(x): return 2 * x\n")
    printed = call("""
        import os, sys
        sys.path.insert(0, os.path.abspath("beside"))
        import helper
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

        class Task:
            def __init__(self, factor):
                self.factor = factor
            def __call__(self, x):
                return self.factor * helper.twice(x), __name__, sys.argv, os.getcwd() == CWD, sys.path[0]

        CWD = os.getcwd()
        if __name__ == "__main__":
            sys.argv = ["renamed", "arg"]
            print(elastic_launch(LaunchConfig(1, 1, 1), Task(5))(3)[0])
    """)

    assert printed == f"(30, '__mp_main__', ['renamed', 'arg'], True, '{here / 'beside'}')\n"


def test_a_function_that_raises_is_a_child_failed_error_with_its_message(call: Callable[[str], str]) -> None:
    printed = call("""
        import json, os, signal
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

        def train():
            if os.environ["RANK"] == "1":
                raise KeyError("the cause")
            signal.pause()

        if __name__ == "__main__":
            try:
                elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0), train)()
            except Exception as err:
                from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
                assert type(err) is ChildFailedError, repr(err)
                rank, first = err.get_first_failure()
                print(json.dumps([err.name, list(err.failures), rank, first.local_rank, first.exitcode, first.message]))
    """)
    name, failures, rank, local_rank, exitcode, message = json.loads(printed)

    assert (name, failures, rank, local_rank, exitcode) == ("train", [1], 1, 1, 1)
    assert message["message"] == "KeyError: 'the cause'"
    stack = message["extraInfo"]["py_callstack"]
    assert "in train" in stack
    assert "gpulaunch" not in stack, "no frame of ours"


def test_the_first_cause_comes_first_though_an_echo_left_the_older_file(call: Callable[[str], str]) -> None:
    """A rank killed by a signal leaves no file; torch, which goes by the files' times, would blame its peer."""
    printed = call("""
        import json
        from gpulaunch.compat import launch

        echo = {"message": "Connection closed by peer", "extraInfo": {"py_callstack": "", "timestamp": "1000"}}
        with open("error.json", "w") as file:
            json.dump({"message": echo}, file)
        with open("torn.json", "w") as file:
            file.write('{"message": ')
        error = launch.child_failed_error([
            dict(rank=5, local_rank=1, pid=15, exitcode=-9, error_file="none.json", wall_time_s=1001.5),
            dict(rank=4, local_rank=0, pid=14, exitcode=1, error_file="error.json", wall_time_s=1002.5),
            dict(rank=6, local_rank=2, pid=16, exitcode=1, error_file="torn.json", wall_time_s=1003.5),
        ], "train")
        rank, first = error.get_first_failure()
        print(rank, first.exitcode, first.message, list(error.failures), error.failures[6].timestamp)
    """)

    assert printed == "5 -9 Signal 9 (SIGKILL) received by PID 15 [5, 4, 6] 1003\n"


def test_restarts_are_the_configurations(call: Callable[[str], str]) -> None:
    """torch's default is 3; the values of the last attempt count."""
    printed = call("""
        import os
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

        def third_time_lucky():
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt < 2 and os.environ["RANK"] == "1":
                raise RuntimeError
            return attempt

        if __name__ == "__main__":
            print(elastic_launch(LaunchConfig(1, 1, 2), third_time_lucky)())
    """)

    assert printed == "{0: 2, 1: 2}\n"


def test_what_cannot_travel_is_named(call: Callable[[str], str]) -> None:
    printed = call("""
        import threading
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch

        def give_a_lock():
            return threading.Lock()

        def attempt(function, *args):
            try:
                elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), function)(*args)
            except TypeError as err:
                print(err)
            except Exception as err:
                print(err.failures[0].message["message"])

        if __name__ == "__main__":
            attempt(lambda: None)
            attempt(print, threading.Lock())
            attempt(give_a_lock)
    """)
    a_lambda, a_lock, a_value = printed.splitlines()

    assert a_lambda.startswith("cannot send <lambda> and its arguments to the ranks: ")
    assert a_lambda.endswith("it must be a function at the top level of a module, and its arguments must be picklable")
    assert a_lock.startswith("cannot send print and its arguments to the ranks: cannot pickle '_thread.lock' object")
    assert a_value.startswith("TypeError: cannot send the return value of rank 0 back to the caller: ")


def test_a_function_of_an_interactive_session_is_refused_and_others_are_not(here: Path) -> None:
    """`python -c` and notebooks have no main file that a rank could import."""
    import subprocess

    program = """
import operator
from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
def train(): pass
print(elastic_launch(LaunchConfig(1, 1, 1), operator.add)(1, 2))
elastic_launch(LaunchConfig(1, 1, 1), train)()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.stdout == "{0: 3}\n"
    assert ended.stderr.splitlines()[-1].startswith("TypeError: cannot send train to the ranks: it, or one of its arg")


def test_a_main_file_without_its_guard_fails_once_and_says_why(start_caller: Any) -> None:
    caller = start_caller("""
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
        def train(): pass
        elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), train)()
    """)
    code, _, stderr = caller.wait()

    assert code == 1
    assert "if __name__ == '__main__':" in stderr


def test_the_call_and_its_values_are_private(here: Path) -> None:
    function_call.pack(str(here), os.getcwd, [])
    function_call.keep(str(here), 3, {"loss": 0.5})

    assert {path.name: path.stat().st_mode & 0o777 for path in here.iterdir()} == {
        "call.pickle": 0o600,
        "value-3.pickle": 0o600,
    }
    assert function_call.value(str(here), 3) == {"loss": 0.5}


def test_a_rank_that_exits_well_without_returning_gives_none(call: Callable[[str], str]) -> None:
    printed = call("""
        import sys
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
        if __name__ == "__main__":
            print(elastic_launch(LaunchConfig(1, 1, 1), sys.exit)(0))
    """)

    assert printed == "{0: None}\n"


# --- commands -----------------------------------------------------------------------------------------------------


def test_commands_give_none_for_each_rank(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A Python with a script, a module or code; any other command; macros."""
    (here / "script.py").write_text("import os, sys; print(sys.argv, os.environ['LOCAL_RANK'])\n")

    def shown(*command: str) -> list[str]:
        assert elastic_launch(LaunchConfig(1, 1, 2), command[0])(*command[1:]) == {0: None, 1: None}
        return sorted(capfd.readouterr().out.splitlines())

    script = "['script.py', '--x', '{0}'] {0}"
    assert shown(sys.executable, "-u", "script.py", "--x", "${local_rank}") == [
        f"[{r}] {script.format(r)}" for r in (0, 1)
    ]
    assert shown(sys.executable, "-c", "print('code')") == ["[0] code", "[1] code"]
    assert shown(sys.executable, "-m", "this")[0].startswith("[0] ")
    assert shown("sh", "-c", "echo sh $RANK") == ["[0] sh 0", "[1] sh 1"]


def test_teed_lines_go_to_sys_stdout_and_others_to_the_descriptor(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's own tee: a notebook or a test has another object there."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def launch(tee: str) -> None:
        config = LaunchConfig(1, 1, 2, role="t", logs_specs=LogSettings(tee=tee))
        elastic_launch(config, "sh")("-c", "echo out $RANK; echo err $RANK >&2")

    launch("0:3,1:1")
    assert sorted(out.getvalue().splitlines()) == ["[t0]:out 0", "[t1]:out 1"]
    assert "[t0]:err 0\n" in err.getvalue()
    assert capfd.readouterr().out == ""

    launch("0")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert len(out.getvalue().splitlines()) == 2


def test_arguments_of_a_command_need_not_be_text(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch_agent(LaunchConfig(1, 1, 1), "echo", [1, Path("x"), 2.5])

    assert capfd.readouterr().out == "1 x 2.5\n"


def test_a_command_that_fails_is_named_as_torch_names_it(call: Callable[[str], str]) -> None:
    printed = call("""
        import sys
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
        for command in (["sh", "-c", "exit 3"], [sys.executable, "-u", "missing.py"], [sys.executable, "-c", "1/0"]):
            try:
                elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), command[0])(*command[1:])
            except ValueError as err:
                print(err)
            except Exception as err:
                print(type(err).__name__, err.name, err.failures[0].exitcode)
    """)

    assert printed.splitlines() == [
        "ChildFailedError sh 3",
        "no such script: missing.py",
        "ChildFailedError 1/0 1",
    ]


def test_files_go_where_the_configuration_and_our_own_variables_say(
    call: Callable[[str], str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DefaultLogsSpecs of torch; the prefix template; the job's own files say who asked for it."""
    monkeypatch.setenv("GPULAUNCH_JOB_DIR", "job")
    printed = call("""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
        config = LaunchConfig(
            1, 1, 2, run_id="mine", log_line_prefix_template="<${rank}> ",
            logs_specs=DefaultLogsSpecs(log_dir="logs", redirects={1: Std.OUT}, tee={0: Std.OUT}),
        )
        elastic_launch(config, "sh")("-c", "echo out $RANK")
    """)
    (run,) = (here / "logs").iterdir()
    job = json.loads((here / "job" / "job.json").read_text())

    assert printed == "<0> out 0\n"
    assert run.name.startswith("mine_")
    assert (run / "attempt_0" / "1" / "stdout.log").read_text() == "out 1\n"
    assert job["origins"]["nproc-per-node"] == "the calling program"


# --- nodes, threads -----------------------------------------------------------------------------------------------


def test_two_nodes_get_their_own_global_ranks(start_caller: Any) -> None:
    port = free_port()
    nodes = [
        start_caller(f"""
            import os
            from gpulaunch.compat.torchrun import LaunchConfig, elastic_launch
            def where():
                return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")]
            if __name__ == "__main__":
                config = LaunchConfig(2, 2, 2, run_id="both", rdzv_backend="static", rdzv_endpoint="127.0.0.1:{port}",
                                      rdzv_configs={{"rank": {node}}})
                print(elastic_launch(config, where)())
        """)
        for node in (0, 1)
    ]
    printed = [node.wait()[1] for node in nodes]

    assert printed == [
        "{0: ['0', '0', '0', '4'], 1: ['1', '1', '0', '4']}\n",
        "{2: ['2', '0', '1', '4'], 3: ['3', '1', '1', '4']}\n",
    ]


def test_it_may_be_called_from_any_thread_and_from_several(here: Path) -> None:
    results: list[dict[int, object]] = []

    def launch() -> None:
        results.append(elastic_launch(LaunchConfig(1, 1, 2), os.path.basename)("a/b"))

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [{0: "b", 1: "b"}] * 2
