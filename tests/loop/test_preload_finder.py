"""What a program does before an import has its effect, whatever was imported before the fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

PACKAGES = {
    "readsvar": "import os\nthreads = os.environ.get('READSVAR_NUM_THREADS', 'unset')",
    "usesvar": "import readsvar",
    "healthy": "import os, random\nhome = os.getenv('HEALTHY_HOME')\nfixed = random.Random(42)\nmarker = object()",
    "ownrandom": "import random\ngenerator = random.Random()",
    "drawn": "import random\ngenerator = random.Random()\nvalue = generator.random()",
    "numpyrandom": "import numpy\ngenerator = numpy.random.default_rng()",
    "fixedrandom": "import numpy\ngenerator = numpy.random.default_rng(42)",
    "session": "import uuid\nSESSION = uuid.uuid4().hex",
    "keepspid": "import os\nPID = os.getpid()",
    "keepstime": "import time\nBEGAN = time.time()",
    "locked": "import multiprocessing\nlock = multiprocessing.Lock()",
    "beforetorch": "import sys\nif 'torch' in sys.modules:\n    raise ImportError('import beforetorch before torch')",
    "warnsoftorch": "import sys\nlate = 'torch' in sys.modules",
}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A directory with PACKAGES, installed as far as the launcher can tell, and an empty memory."""
    site = tmp_path / "venv/site-packages"
    for name, text in PACKAGES.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text + "\n")
    return {"PYTHONPATH": os.fspath(site), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}


def write(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def seen(text: str) -> list[str]:
    """What the ranks printed, without their prefixes, in the order of the ranks."""
    return [line.partition("SEEN ")[2] for line in sorted(text.splitlines()) if "SEEN " in line]


def events(job: Path, name: str) -> list[dict[str, object]]:
    found = map(json.loads, (job / "events.jsonl").read_text().splitlines())
    return [event for event in found if event["event"] == name]


def test_a_variable_set_conditionally_before_an_import_has_its_effect_and_is_remembered(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        import settings
        import usesvar
        print("SEEN", usesvar.readsvar.threads, os.getppid() > 0)
        """,
    )
    write(tmp_path, "import os\nfor n in ('3',):\n    os.environ['READSVAR_NUM_THREADS'] = n", "settings.py")

    first = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "first", script, env=env)
    second = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "second", script, env=env)

    assert seen(first.stdout) == seen(second.stdout) == ["3 True"] * 2
    assert len(events(tmp_path / "first", "rank_started_again")) == 2
    (said,) = [line for line in first.stderr.splitlines() if "restart from" in line]
    assert "READSVAR_NUM_THREADS was set before the import of readsvar" in said
    assert not events(tmp_path / "second", "rank_started_again")
    (ready,) = events(tmp_path / "second", "fork_server_ready")
    assert "READSVAR_NUM_THREADS" in ready["refused"]["usesvar"]


def test_what_torch_reads_while_it_is_imported_may_come_from_load_dotenv(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    """The thread count is what libgomp made of it. The output so far is not lost, and no attempt starts twice again."""
    script = write(
        tmp_path,
        """
        from dotenv import load_dotenv
        load_dotenv(override=True)
        print("FIRST", flush=True)
        import logging, os, sys, torch, usesvar
        print("SEEN", torch.get_num_threads(), logging.getLogger("torch._inductor").level, usesvar.readsvar.threads)
        sys.exit("FAILS" in os.environ and os.environ["GPULAUNCH_ATTEMPT"] == "0")
        """,
    )
    (tmp_path / ".env").write_text("OMP_NUM_THREADS=2\nTORCH_LOGS=+inductor\n")
    plain = subprocess.run(
        [sys.executable, script], env={**os.environ, **env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )

    first = gpulaunch(
        *("--nproc", "2", "--max-restarts", "1", "--job-dir", tmp_path / "first", script), env={**env, "FAILS": "once"}
    )
    second = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "second", script, env=env)

    assert (first.code, second.code) == (0, 0)
    assert seen(first.stdout)[:2] == seen(first.stdout)[2:] == seen(second.stdout) == ["2 10 unset"] * 2
    assert seen(plain.stdout) == ["2 10 unset"]
    assert len(events(tmp_path / "first", "rank_started_again")) == 2
    (said,) = [line for line in first.stderr.splitlines() if "restart from" in line]
    assert "OMP_NUM_THREADS" in said
    assert "appear twice" in said
    assert first.stdout.count("FIRST") == 6
    assert second.stdout.count("FIRST") == 2
    assert "OMP_NUM_THREADS, TORCH_LOGS were set before the import of torch" in second.stderr


def test_what_mkl_reads_while_torch_is_imported_has_its_effect(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    """Read in C, unseen from Python. A job and a plain interpreter: 6 s of CPU time."""
    script = write(
        tmp_path,
        """
        import settings
        import torch
        print("SEEN", torch.get_num_threads(), "mkl_get_max_threads() : 2" in torch.__config__.parallel_info())
        """,
    )
    write(tmp_path, "import os\nfor n in ('2',):\n    os.environ['MKL_NUM_THREADS'] = n", "settings.py")
    env |= {"OMP_NUM_THREADS": "1"}
    plain = subprocess.run([sys.executable, script], env={**os.environ, **env}, capture_output=True, text=True)

    ended = gpulaunch("--nproc", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert ended.code == 0, ended
    assert seen(ended.stdout) == seen(plain.stdout) != []
    assert "MKL_NUM_THREADS was set before the import of torch" in ended.stderr


def test_a_rank_that_starts_again_has_what_it_was_started_with(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    """Its stdio, signals and timers; atexit functions do not run for a program that has not ended."""
    script = write(
        tmp_path,
        """
        import atexit, os, signal, sys, threading
        print("BEGAN", os.isatty(1), signal.getsignal(signal.SIGHUP), signal.pthread_sigmask(signal.SIG_BLOCK, []),
              signal.getitimer(signal.ITIMER_REAL), flush=True)
        first = not os.path.exists("begun")
        open("begun", "w").close()
        log = open("log", "a")
        log.write("line")
        atexit.register(lambda: open("ends", "a").write("end"))
        output = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        if first:
            signal.signal(signal.SIGALRM, print)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        def work():
            import settings, usesvar
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        signal.pause() if first else None
        os.dup2(output, 1)
        print("SEEN", sys.modules["usesvar"].readsvar.threads)
        """,
    )
    write(tmp_path, "import os\nfor n in ('3',):\n    os.environ['READSVAR_NUM_THREADS'] = n", "settings.py")

    ended = gpulaunch("--nproc", "1", "--preload", "usesvar", "--job-dir", tmp_path / "run", script, env=env)

    assert (ended.code, seen(ended.stdout)) == (0, ["3"])
    first, second = (line.partition("BEGAN ")[2] for line in ended.stdout.splitlines() if "BEGAN" in line)
    assert first == second
    assert "1 of their threads were ended" in ended.stderr
    assert ((tmp_path / "log").read_text(), (tmp_path / "ends").read_text()) == ("line", "end")


def test_a_variable_set_after_the_process_group_exists_is_said_to_come_too_late(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    """Next time it has its effect; in the job's next attempt, after a failure, as well."""
    script = write(
        tmp_path,
        """
        import os, sys
        import torch.distributed
        torch.distributed.init_process_group("gloo")
        exec("os.environ['READSVAR_NUM_THREADS'] = '3'")
        import usesvar
        print("SEEN", usesvar.readsvar.threads)
        torch.distributed.barrier()  # before a failure of one ends the others
        torch.distributed.destroy_process_group()
        sys.exit(int(os.environ["GPULAUNCH_ATTEMPT"] == "0"))
        """,
    )
    ended = gpulaunch("--nproc", "2", "--max-restarts", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert (ended.code, sorted(seen(ended.stdout))) == (0, ["3", "3", "unset", "unset"])
    assert len(events(tmp_path / "run", "rank_kept_preloaded")) == 2
    (said,) = [line for line in ended.stderr.splitlines() if "too late" in line]
    assert "READSVAR_NUM_THREADS was set before the import of readsvar" in said
    assert "the process group exists" in said


def test_a_module_of_a_package_keeps_its_fixed_settings_and_is_forked(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    """`-m` with fixed texts; nothing has to start again, and the modules are those of the fork server."""
    write(
        tmp_path,
        """
        import os
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ["TORCH_LOGS"] = "+inductor"
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        """,
        "job/__init__.py",
    )
    write(
        tmp_path,
        """
        import os
        os.environ["READSVAR_NUM_THREADS"] = "7"
        os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"
        import logging, torch, torch._inductor.config, torch.distributed, usesvar
        print("SEEN", torch.get_num_threads(), usesvar.readsvar.threads, logging.getLogger("torch._inductor").level,
              torch.distributed.get_debug_level().name, torch._inductor.config.max_autotune)
        """,
        "job/train.py",
    )
    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "run", "-m", "job.train", env=env)

    assert seen(ended.stdout) == ["2 7 10 DETAIL True"] * 2
    assert not events(tmp_path / "run", "rank_started_again")
    assert events(tmp_path / "run", "fork_server_ready")[0]["loaded"] == ["usesvar"]


def test_no_two_ranks_share_what_an_import_makes_for_one_process(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    """Nor a rank and the one in its place after a restart."""
    script = write(
        tmp_path,
        """
        import faker, ownrandom, drawn, numpyrandom, fixedrandom, session, keepspid, keepstime, locked, healthy
        import os, sys, time
        draws = drawn.value, ownrandom.generator.random(), numpyrandom.generator.random(), session.SESSION, keepspid.PID
        draws += (faker.Faker().uuid4(),)
        same = fixedrandom.generator.random(), healthy.fixed.random(), id(healthy.marker)
        print("SEEN", *draws, keepstime.BEGAN, keepspid.PID == os.getpid(), *same, flush=True)
        if os.environ["GPULAUNCH_ATTEMPT"] == "0":
            open(f"printed-{os.environ['RANK']}", "w").close()
            while not all(map(os.path.exists, ("printed-0", "printed-1"))):
                time.sleep(0.01)
            sys.exit(os.environ["RANK"] == "1")
        """,
    )
    ended = gpulaunch("--nproc", "2", "--max-restarts", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert ended.code == 0, ended
    attempts = [line.split() for line in seen(ended.stdout)]
    assert len(attempts) == 4, "two ranks, two attempts"
    for made in list(zip(*attempts, strict=True))[:7]:
        assert len(set(made)) == 4, "drawn by each for itself, in each attempt"
    assert [line[7] for line in attempts] == ["True"] * 4, "its own pid"
    assert len({tuple(line[8:]) for line in attempts}) == 1, "fixed seeds, and what is harmless is the same object"
    (ready,) = events(tmp_path / "run", "fork_server_ready")
    assert set(ready["loaded"]) >= {"ownrandom", "session", "fixedrandom", "healthy"}
    assert set(ready["refused"]) == {"drawn", "numpyrandom", "keepspid", "keepstime", "locked"}
    noted = json.loads((tmp_path / "run/job.json").read_text())["preloading"]
    assert noted == {"packages": ["torch", *ready["loaded"]], "refused": ready["refused"], "spawn_because": ""}


def test_torch_is_not_there_before_the_program_imports_it(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    """And what is handed out is as good as imported: sources, specs, reloading, pickling to a spawned process."""
    script = write(
        tmp_path,
        """
        import importlib, importlib.metadata, importlib.util, inspect, multiprocessing, pkgutil, sys
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert importlib.util.find_spec("torch").origin.endswith("torch/__init__.py")
        assert "torch" not in sys.modules
        import beforetorch, warnsoftorch
        import healthy
        import torch, torch.distributed
        assert healthy.__spec__.loader is healthy.__loader__
        assert importlib.import_module("torch") is sys.modules["torch"] is torch
        assert torch.__spec__.name == "torch" and "numpy" in sys.modules
        assert torch.__spec__.origin == torch.__file__ and not torch.__spec__._initializing
        assert "def relu" in inspect.getsource(torch.nn.functional.relu)
        assert any(each.name == "torch.nn" for each in pkgutil.iter_modules(torch.__path__, "torch."))
        assert importlib.metadata.version("torch").startswith(torch.__version__.partition("+")[0])
        marker = healthy.marker
        assert importlib.reload(healthy) is healthy and healthy.marker is not marker
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.apply(torch.add, (1, 2)) == 3
            print("SEEN", warnsoftorch.late)
        """,
    )
    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "run", script, env=env)

    assert ended.code == 0, ended
    assert seen(ended.stdout) == ["False"] * 2
    assert not events(tmp_path / "run", "rank_started_again")
    assert set(events(tmp_path / "run", "fork_server_ready")[0]["loaded"]) == {"beforetorch", "warnsoftorch", "healthy"}


def test_what_must_come_before_torch_is_not_handed_out_after_it(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    """Torch is imported where the source does not show it, so both were preloaded before it. A job and a plain
    interpreter, each of which imports torch: 6 s of CPU time."""
    script = write(
        tmp_path,
        """
        exec("import torch")
        import warnsoftorch
        print("SEEN", warnsoftorch.late, flush=True)
        import beforetorch
        import torch
        """,
    )
    plain = subprocess.run([sys.executable, script], env={**os.environ, **env}, capture_output=True, text=True)

    ended = gpulaunch("--nproc", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert (ended.code, plain.returncode) == (1, 1)
    assert seen(ended.stdout) == seen(plain.stdout) == ["True"]
    for stderr in (ended.stderr, plain.stderr):
        assert "ImportError: import beforetorch before torch" in stderr
    assert set(events(tmp_path / "run", "fork_server_ready")[0]["loaded"]) == {"beforetorch", "warnsoftorch"}
    assert "warnsoftorch depends on whether torch is imported before it" in ended.stderr


def test_a_module_found_first_by_a_changed_path_is_the_programs(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    write(tmp_path, "origin = 'vendored'", "vendor/healthy.py")
    script = write(
        tmp_path,
        """
        import sys
        exec("sys.path.insert(0, 'vendor')")
        import healthy
        print("SEEN", healthy.origin)
        """,
    )
    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "run", script, env=env)

    assert seen(ended.stdout) == ["vendored"] * 2
    assert not events(tmp_path / "run", "rank_started_again")


def test_transformers_finds_its_cache_where_the_program_says(gpulaunch, tmp_path: Path, env: dict[str, str]) -> None:
    script = write(
        tmp_path,
        f"""
        import os
        if "HF_HOME" not in os.environ:
            os.environ["HF_HOME"] = {os.fspath(tmp_path / "hub")!r}
        import transformers
        from huggingface_hub import constants
        print("SEEN", constants.HF_HOME)
        """,
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", script]
    twin = subprocess.run(torchrun, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True)

    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "run", script, env=env)

    assert seen(ended.stdout) == seen(twin.stdout) * 2 == [os.fspath(tmp_path / "hub")] * 2


STATE = """
    import logging.config, os, sys, tempfile, threading, warnings
    def state():
        import logging, signal, locale, multiprocessing, socket, decimal, gc, random
        return repr([
            [(action, kind.__name__) for action, _, kind, _, _ in warnings.filters if "SymPy" not in kind.__name__],
            tempfile.tempdir,
            logging.getLogger().handlers, logging.getLogger().level, logging.Logger.manager.disable,
            logging.getLogger("healthy").level,
            signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__, locale.setlocale(locale.LC_ALL),
            multiprocessing.get_start_method(allow_none=True), socket.getdefaulttimeout(), decimal.getcontext(),
            gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval(), sys.displayhook.__module__,
            threading.main_thread().native_id == os.getpid(), threading.Thread().name,
        ])
    before = state()
    warnings.simplefilter("ignore")
    logging.config.dictConfig({"version": 1})
    logging.getLogger("healthy").setLevel(50)
    import torch, healthy
    os.environ["TMPDIR"] = os.getcwd()
    print("SEEN", before, state(), logging.getLogger("torch.distributed").disabled, tempfile.gettempdir())
    """


def test_the_standard_library_is_as_if_nothing_had_been_imported_before(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    """Before the program's first import, and after it: filters of warnings, loggers, the temporary directory."""
    script = write(tmp_path, STATE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", script]
    plain = subprocess.run(torchrun, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True)

    ended = gpulaunch("--nproc", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert "healthy" in events(tmp_path / "run", "fork_server_ready")[0]["loaded"]
    assert not events(tmp_path / "run", "rank_started_again")
    assert seen(ended.stdout) == seen(plain.stdout)
    assert seen(ended.stdout)[0].endswith(os.fspath(tmp_path))


def test_a_tee_in_the_place_of_stderr_gets_what_a_preloaded_package_logs(
    gpulaunch, tmp_path: Path, env: dict[str, str]
) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        class Tee:
            def __init__(self, real):
                self.real, self.file = real, open(f"tee-{os.environ['RANK']}.log", "w")
            def write(self, text):
                self.file.write(text)
                return self.real.write(text)
            def __getattr__(self, name):
                return getattr(self.real, name)
        sys.stderr = Tee(sys.stderr)
        from transformers.utils import logging
        logging.get_logger("transformers.mine").warning("important")
        """,
    )
    ended = gpulaunch("--nproc", "1", "--job-dir", tmp_path / "run", script, env=env)

    assert ended.code == 0, ended
    assert "transformers" in events(tmp_path / "run", "fork_server_ready")[0]["loaded"]
    assert "important" in (tmp_path / "tee-0.log").read_text()
