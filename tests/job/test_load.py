"""From words, variables and a job file to one job: precedence, origins, and what is refused with which sentence."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.launcher.job.host_info import Gpu, HostInfo
from gpulaunch.launcher.job.load import UsageError, load
from gpulaunch.launcher.job.spec import Etcd, Request, Std

Load = Callable[..., Request]
MakeHost = Callable[..., HostInfo]


def refused(job: Load, *words: str, **kwargs: object) -> str:
    with pytest.raises(UsageError) as caught:
        job(*words, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -- precedence


@pytest.mark.parametrize(
    ("toml", "environ", "words", "nproc", "origin"),
    [
        (None, {}, [], 1, "default"),
        ("nproc = 2", {}, [], 2, "job.toml"),
        ("nproc-per-node = 2", {"PET_NPROC_PER_NODE": "3"}, [], 3, "environment PET_NPROC_PER_NODE"),
        ("nproc_per_node = 2", {"GPULAUNCH_NPROC": "3"}, [], 3, "environment GPULAUNCH_NPROC"),
        ("nproc = 2", {"PET_NPROC_PER_NODE": "3"}, ["--nproc", "4"], 4, "command line"),
        ("nproc = 2", {}, ["--nproc_per_node=4"], 4, "command line"),
        (None, {"PET_NPROC_PER_NODE": "3"}, ["--nproc-per-node", "4"], 4, "command line"),
    ],
)
def test_job_file_then_environment_then_command_line(
    job: Load, toml: str | None, environ: dict[str, str], words: list[str], nproc: int, origin: str
) -> None:
    if toml is not None:
        Path("job.toml").write_text(toml)
        words = ["--config", "job.toml", *words]
    spec = job(*words, environ=environ).spec

    assert (spec.nproc, spec.origins["nproc-per-node"]) == (nproc, origin)


def test_a_flag_of_the_file_can_be_switched_off_by_the_environment(job: Load) -> None:
    Path("job.toml").write_text("no-profile = true\nstandalone = true")

    assert job("--config", "job.toml").spec.profile is False
    assert job("--config", "job.toml", environ={"GPULAUNCH_NO_PROFILE": "0"}).spec.profile is True
    assert job(environ={"GPULAUNCH_CONFIG": "job.toml"}).spec.profile is False


def test_the_file_names_the_program_and_the_command_line_replaces_it_with_its_arguments(job: Load) -> None:
    Path("other.py").write_text("")
    Path("job.toml").write_text('script = "other.py"\nargs = ["--lr", "3"]')
    from_file = job("--config", "job.toml", program=False).spec
    from_line = job("--config", "job.toml").spec

    assert (from_file.program.target, from_file.program.args) == ("other.py", ("--lr", "3"))
    assert (from_line.program.target, from_line.program.args) == ("train.py", ())
    assert (from_file.origins["program"], from_line.origins["program"]) == ("job.toml", "command line")


def test_two_variables_for_one_option_must_agree(job: Load) -> None:
    assert job(environ={"PET_NPROC_PER_NODE": "2", "GPULAUNCH_NPROC": "2"}).spec.nproc == 2
    line = refused(job, environ={"PET_NPROC_PER_NODE": "2", "GPULAUNCH_NPROC": "3"})

    assert line == "PET_NPROC_PER_NODE=2 but GPULAUNCH_NPROC=3: two values for --nproc-per-node; unset one"


def test_a_bad_variable_is_named_as_such(job: Load) -> None:
    assert refused(job, environ={"PET_STANDALONE": "yes"}) == "PET_STANDALONE: expected 0 or 1, got 'yes'"
    assert refused(job, environ={"PET_MAX_RESTARTS": "x"}) == "PET_MAX_RESTARTS: expected a whole number, got 'x'"
    assert refused(job, environ={"PET_NNODES": "0"}).startswith("PET_NNODES: a job needs at least 1 node")


# -- the program


def test_the_program_as_torchrun_would_run_it(job: Load, script: str, make_host: MakeHost) -> None:
    Path("run.sh").write_text("")
    Path("run.sh").chmod(0o755)
    kinds = [
        load(words, {"PATH": "/nowhere"}, make_host()).spec.program
        for words in (
            ["train.py", "-x"],
            ["-m", "pkg.mod"],
            ["--no-python", "./run.sh"],
            ["--run-path", "--no-python", "train.py"],
        )
    ]

    assert [(each.kind, each.target) for each in kinds] == [
        ("script", "train.py"),
        ("module", "pkg.mod"),
        ("exec", "./run.sh"),
        ("run_path", "train.py"),
    ]
    assert {each.python for each in kinds} == {sys.executable}
    assert job(environ={"PYTHON_EXEC": "/opt/python"}).spec.program.python == "/opt/python"


def test_what_follows_the_program_belongs_to_it(script: str, make_host: MakeHost) -> None:
    spec = load(["--nproc", "2", script, "--nproc", "9", "-m", "--help", "--"], {}, make_host()).spec

    assert (spec.nproc, spec.program.args) == (2, ("--nproc", "9", "-m", "--help", "--"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian.py"], "no such script: trian.py; did you mean train.py?"),
        (["./trian.py"], "no such script: ./trian.py; did you mean ./train.py?"),
        (["docktor"], "no such script: docktor; did you mean doctor?"),
        (["zzz"], "no such script: zzz"),
        (["nowhere/train.py"], "no such script: nowhere/train.py (the directory nowhere does not exist)"),
        (["--no-python", "no-such-command"], "--no-python: no-such-command: not found in PATH"),
        (
            ["--no-python", "./train.py"],
            "--no-python: ./train.py is not executable; run chmod +x, or remove --no-python",
        ),
        (
            ["--no-python", "-m", "pkg"],
            "--no-python and --module contradict each other: a module is run by python; remove one",
        ),
        ([], "no program to run: gpulaunch [options] PROGRAM [arguments] (or `script` in a job file)"),
        ([""], "the program's name is empty"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_starts(
    script: str, words: list[str], line: str, make_host: MakeHost
) -> None:
    with pytest.raises(UsageError) as caught:
        load(words, {"PATH": "/bin"}, make_host())

    assert str(caught.value) == line


def test_a_module_is_left_to_python_and_so_is_a_name_with_a_macro(script: str, make_host: MakeHost) -> None:
    assert load(["-m", "no.such.module"], {}, make_host()).spec.program.target == "no.such.module"
    assert load(["train_${local_rank}.py"], {}, make_host()).spec.program.target == "train_${local_rank}.py"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-m", "pkg.train"], "train"),
        (["-m", "pkg.__main__"], "pkg"),
        (["train.py"], "train"),
        (["--name", "a-b.1", "train.py"], "a-b.1"),
    ],
)
def test_the_job_has_a_name_fit_for_a_directory(script: str, words: list[str], name: str, make_host: MakeHost) -> None:
    assert load(words, {}, make_host()).spec.name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a b", "x" * 65])
def test_a_name_unfit_for_a_directory_is_refused(job: Load, name: str) -> None:
    assert "must be 1 to 64 letters" in refused(job, "--name", name)


# -- ranks


@pytest.mark.parametrize(
    ("text", "gpus", "nproc"),
    [("3", 0, 3), ("auto", 0, 8), ("auto", 4, 4), ("gpu", 2, 2), ("cpu", 2, 8), (" 2 ", 0, 2)],
)
def test_nproc_in_words(job: Load, text: str, gpus: int, nproc: int, make_host: MakeHost) -> None:
    assert job("--nproc", text, on=make_host(gpus=gpus)).spec.nproc == nproc


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0", "--nproc: a job needs at least 1 rank per node, got 0"),
        ("-2", "--nproc: a job needs at least 1 rank per node, got -2"),
        ("gpu", "--nproc gpu: there is no GPU here: no NVIDIA driver; use --nproc auto or a number"),
        ("xpu", "--nproc xpu: there is no Intel GPU here that torch can use; use --nproc auto or a number"),
        ("GPU", "--nproc: expected a number, auto, gpu, cpu or xpu, got 'GPU'; did you mean gpu?"),
        ("2.5", "--nproc: expected a number, auto, gpu, cpu or xpu, got '2.5'"),
    ],
)
def test_nproc_that_makes_no_job(job: Load, text: str, line: str) -> None:
    assert refused(job, "--nproc", text) == line


TORCH = """
class torch:
    def __init__(self, count):
        self.device_count, self.is_available = lambda: count, lambda: count > 0
accelerator, cuda, xpu = torch({any}), torch({gpu}), torch({xpu})
"""


@pytest.mark.parametrize("device", ["kfd", "dri/renderD128", "accel/accel0", "dxg"])
@pytest.mark.parametrize(
    ("text", "seen", "nproc"),
    [
        ("auto", {"any": 4, "gpu": 4, "xpu": 0}, 4),
        ("gpu", {"any": 4, "gpu": 2, "xpu": 4}, 2),
        ("xpu", {"any": 4, "gpu": 0, "xpu": 3}, 3),
        ("auto", {"any": 0, "gpu": 0, "xpu": 0}, 8),
    ],
)
def test_accelerators_that_nvml_does_not_know_are_counted_by_torch(
    job: Load, make_host: MakeHost, tmp_path: Path, device: str, text: str, seen: dict[str, int], nproc: int
) -> None:
    """A made-up torch: 50 ms each."""
    (tmp_path / "torch.py").write_text(TORCH.format(**seen))
    (tmp_path / "dev" / device).parent.mkdir(parents=True)
    (tmp_path / "dev" / device).touch()

    counted = job("--nproc", text, on=make_host(root=str(tmp_path)), environ={"PYTHONPATH": str(tmp_path)})

    assert counted.spec.nproc == nproc


def test_a_torch_that_cannot_count_is_not_taken_for_none(job: Load, make_host: MakeHost, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libamdhip64.so: no such file')")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    given = {"on": make_host(root=str(tmp_path)), "environ": {"PYTHONPATH": str(tmp_path)}}

    assert refused(job, "--nproc", "auto", **given) == (
        "--nproc auto: torch cannot count the accelerators here (ImportError: libamdhip64.so: no such file); "
        "give a number"
    )
    assert job("--nproc", "3", **given).spec.nproc == 3


def test_an_accelerator_without_torch_is_no_gpu(job: Load, make_host: MakeHost, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    given = {"on": make_host(root=str(tmp_path)), "environ": {"PYTHONPATH": str(tmp_path)}}

    assert job("--nproc", "auto", **given).spec.nproc == 8
    with pytest.raises(UsageError, match="there is no GPU here"):
        job("--nproc", "gpu", **given)


def test_detected_values_say_why(job: Load) -> None:
    origins = job("--nproc", "auto").spec.origins

    assert origins["nproc-per-node"] == "detected: cores, all 8"


@pytest.mark.parametrize(
    ("words", "environ", "threads"),
    [
        (["--nproc", "2"], {}, 4),
        (["--nproc", "3"], {}, 2),
        (["--nproc", "100"], {}, 1),
        (["--nproc", "1"], {}, None),
        (["--nproc", "2"], {"OMP_NUM_THREADS": "7"}, None),
    ],
)
def test_the_ranks_share_the_cores(job: Load, words: list[str], environ: dict[str, str], threads: int | None) -> None:
    assert job(*words, environ=environ).spec.omp_num_threads == threads


# -- where ranks meet: the same answers as torchrun 2.13 gave when it was asked


@pytest.mark.parametrize(
    ("words", "addr", "port", "run_id"),
    [
        ([], "localhost", None, "uuid"),
        (["--rdzv-id", "mine"], "localhost", None, "uuid"),
        (["--standalone", "--rdzv-id", "mine", "--master-port", "1"], "localhost", None, "uuid"),
        (["--master-addr", "10.0.0.1"], "localhost", None, "uuid"),
        (["--standalone", "--local-addr", "127.0.0.3"], "127.0.0.3", None, "uuid"),
        (["--master-port", "29777"], "127.0.0.1", 29777, "none"),
        (["--master-port", "0"], "127.0.0.1", None, "none"),
        (["--rdzv-backend", "c10d"], "localhost", None, "none"),
        (["--rdzv-backend", "c10d", "--rdzv-id", "mine", "--rdzv-endpoint", "localhost:5"], "localhost", None, "mine"),
        (["--nnodes", "1:1", "--rdzv-backend=c10d", "--rdzv-id="], "localhost", None, "uuid"),
        (["--rdzv-backend", "static", "--rdzv-endpoint", "host:5", "--rdzv-id", "mine"], "host", 5, "mine"),
        (["--rdzv-endpoint", "[::1]:5"], "::1", 5, "none"),
        (["--rdzv-endpoint", "fe80::1:5"], "fe80::1", 5, "none"),
        (["--master-addr", "[::1]", "--master-port", "5"], "::1", 5, "none"),
        (["--nnodes", "2"], "127.0.0.1", 29500, "none"),
        (["--nnodes", "2:2", "--node-rank", "1", "--master-addr", "a", "--master-port", "7"], "a", 7, "none"),
    ],
)
def test_rendezvous(job: Load, words: list[str], addr: str, port: int | None, run_id: str) -> None:
    spec = job(*words).spec

    assert (spec.master_addr, spec.master_port) == (addr, port)
    assert uuid.UUID(spec.run_id).version == 4 if run_id == "uuid" else spec.run_id == run_id


ETCD = ("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-id=7")
WORKS = "--rdzv-backend leader --rdzv-endpoint HOST:PORT, the same on every node"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nnodes", "1:4"], f"--nnodes: 1:4 nodes need {WORKS}"),
        (["--nnodes=2", "--rdzv-backend=c10d"], f"--rdzv-backend: 2 nodes need a place to meet: {WORKS}"),
        (
            ["--nnodes=2", "--rdzv_backend=etcd-v2"],
            "--rdzv-backend: 2 nodes need a place to meet: --rdzv-endpoint HOST:PORT,HOST:PORT, members of etcd",
        ),
        ([*ETCD, "--rdzv-endpoint=a,:5"], "--rdzv-endpoint: expected HOST:PORT,HOST:PORT, got 'a,:5'"),
        (
            [*ETCD, "--token-file=t"],
            "--token-file: etcd lets the nodes in by itself; see --rdzv-conf user, password_file, cert and key",
        ),
        (
            [*ETCD, "--rdzv-conf=password=x"],
            "--rdzv-conf: password: everybody on this machine can see it here; write it to a file: password_file=FILE",
        ),
        ([*ETCD, "--rdzv-id=none"], "--rdzv-id: the jobs in etcd are told apart by it; give each another"),
        ([*ETCD, "--rdzv-conf=user=x"], "--rdzv-conf: user and password_file: one needs the other"),
        ([*ETCD, "--rdzv-conf=protocol=ftp"], "--rdzv-conf: protocol: expected http or https, got 'ftp'"),
        ([*ETCD, "--rdzv-conf=key=k"], "--rdzv-conf: key: a certificate is used with protocol=https only"),
        (
            ["--nnodes=2", "--rdzv-endpoint=a:0"],
            "--rdzv-endpoint: the other nodes cannot find any free port (0); name one",
        ),
        (["--nnodes", "2:20:30"], "--nnodes: expected N (or MIN:MAX), got '2:20:30'"),
        (["--nnodes", "two"], "--nnodes: expected N (or MIN:MAX), got 'two'"),
        (["--nnodes", "0"], "--nnodes: a job needs at least 1 node, and MIN at most MAX, got '0'"),
        (["--nnodes", "3:2"], "--nnodes: a job needs at least 1 node, and MIN at most MAX, got '3:2'"),
        (["--nnodes", "2", "--standalone"], "--standalone is one node, but --nnodes is 2"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank: 2 nodes have ranks 0 to 1, got 2"),
        (["--master-port", "5", "--node-rank", "1"], "--node-rank: there is one node, rank 0, got 1"),
        (["--nnodes", "2", "--master-port", "0"], "--master-port: 0 (any free port) works on one node only; name one"),
        (["--master-port", "70000"], "--master-port: a port is between 0 and 65535, got 70000"),
        (["--rdzv-backend", "c10"], "--rdzv-backend: unknown backend 'c10'; did you mean c10d?"),
        (["--rdzv-endpoint", "host"], "--rdzv-endpoint: 'host' names no port; write HOST:PORT"),
        (["--rdzv-endpoint", "host:x"], "--rdzv-endpoint: a port is a number between 0 and 65535, got 'x' in 'host:x'"),
        (["--rdzv-conf", "timeout"], "--rdzv-conf: expected KEY=VALUE,KEY=VALUE, got 'timeout'"),
        (["--rdzv-conf", "timeout=-1"], "--rdzv-conf: timeout: expected a whole number of seconds, got '-1'"),
    ],
)
def test_what_is_no_rendezvous_is_refused_never_shrunk(job: Load, words: list[str], line: str) -> None:
    assert refused(job, *words) == line


def test_etcd_is_reached_as_torchrun_names_it(job: Load) -> None:
    words = ["--nnodes", "2:3", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "a, b:5,[::1]:6", "--rdzv-id", "7"]
    conf = "protocol=https,ca_cert=ca,ssl_cert=own,ssl_cert_key=key,user=me,password_file=f,etcd_prefix=/p"
    conf += ",join_timeout=5"
    elastic = job(*words, "--rdzv-conf", conf).spec.elastic

    assert elastic is not None
    assert elastic.etcd == Etcd(
        endpoints=(("a", 2379), ("b", 5), ("::1", 6)),
        tls=True,
        cacert="ca",
        cert="own",
        key="key",
        user="me",
        password_file="f",
        prefix="/p",
    )
    assert (elastic.min_nodes, elastic.max_nodes, elastic.join_timeout_s) == (2, 3, 5.0)
    plain = job(*words).spec.elastic
    assert plain is not None
    assert plain.etcd is not None
    assert (plain.etcd.tls, plain.etcd.cacert, plain.etcd.prefix) == (False, "", "/gpulaunch")


def test_the_rendezvous_timeout(job: Load) -> None:
    assert job().spec.rdzv_timeout_s == 900
    assert job("--rdzv-conf", "join_timeout=5, timeout=60").spec.rdzv_timeout_s == 60


# -- output


def test_streams_per_rank_also_beyond_ten(job: Load) -> None:
    spec = job("--nproc", "12", "-r", "3", "-t", "0:1,11:2,40:3").spec

    assert set(spec.redirects.values()) == {Std.ALL}
    assert [spec.tee[rank] for rank in (0, 1, 11)] == [Std.OUT, Std.NONE, Std.ERR]
    assert sorted(spec.tee) == list(range(12))


@pytest.mark.parametrize("text", ["4", "", "0:", ":1", "0:1,", "a:1", "0:4", "0:1:2", "\u0663"])
def test_streams_that_are_none(job: Load, text: str) -> None:
    assert refused(job, "-r", text).startswith("--redirects: expected 0 (none), 1 (stdout)")


@pytest.mark.parametrize(
    ("text", "console"),
    [("all", "all"), ("none", "none"), ("0,3", "0,3"), ("0-3", "0,1,2,3"), ("3, 0-1,1", "0,1,3"), ("2-2", "2")],
)
def test_the_console_shows_ranks(job: Load, text: str, console: str) -> None:
    assert job("--nproc", "4", "--console", text).spec.console == console


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0-4", "--console: local rank 4 does not exist: the last of 4 is 3"),
        ("al", "--console: expected all, none, or local ranks such as 0,3 or 0-3, got 'al'; did you mean all?"),
        ("3-1", "--console: expected all, none, or local ranks such as 0,3 or 0-3, got '3-1'"),
        ("", "--console: expected all, none, or local ranks such as 0,3 or 0-3, got ''"),
    ],
)
def test_a_console_of_other_ranks_is_refused(job: Load, text: str, line: str) -> None:
    assert refused(job, "--nproc", "4", "--console", text) == line


def test_filters(job: Load) -> None:
    spec = job("--local-ranks-filter", "0, 2", "--duplicate-stdout-filters", "loss,a,,b").spec

    assert spec.local_ranks_filter == {0, 2}
    assert (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters) == (("loss", "a,b"), ())
    assert refused(job, "--local-ranks-filter", "0,x").startswith("--local-ranks-filter: expected local ranks")


# -- stopping, starting, metrics


def test_signals_by_name(job: Load) -> None:
    assert job().spec.signals == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert job("--signals-to-handle", "SIGTERM, SIGUSR1").spec.signals == ("SIGTERM", "SIGUSR1")
    assert job("--signals-to-handle", "").spec.signals == ()
    assert (
        refused(job, "--signals-to-handle", "TERM")
        == "--signals-to-handle: unknown signal 'TERM'; did you mean SIGTERM?"
    )
    assert "SIGKILL cannot be handled" in refused(job, "--signals-to-handle", "SIGKILL")


def test_signals_that_ask_for_a_save(job: Load) -> None:
    """SIGTERM and SIGUSR1 end the job after a save, SIGUSR2 saves and goes on; what the user says otherwise holds."""
    spec = job().spec
    assert (spec.preempt_signals, spec.notify_signals) == (("SIGTERM", "SIGUSR1"), ("SIGUSR2",))

    # Taken out of torchrun's list, SIGTERM is not handled at all.
    assert job("--signals-to-handle", "SIGINT").spec.preempt_signals == ("SIGUSR1",)
    # A torchrun user for whom SIGUSR2 means the end.
    assert job("--signals-to-handle", "SIGTERM,SIGUSR2").spec.notify_signals == ()
    assert job("--preempt-signals", "SIGUSR2").spec.notify_signals == ()
    assert job("--preempt-signals", "", "--notify-signals", "").spec.preempt_signals == ()
    assert "SIGCHLD is used by the launcher" in refused(job, "--preempt-signals", "SIGCHLD")
    assert "SIGUSR1 already ends the job" in refused(job, "--notify-signals", "SIGUSR1")


@pytest.mark.parametrize(
    ("text", "rate"), [("5/10m", (5, 600.0)), ("1/90", (1, 90.0)), ("0/1.5h", (0, 5400.0)), ("3 / 1d", (3, 86400.0))]
)
def test_a_rate_of_restarts(job: Load, text: str, rate: tuple[int, float]) -> None:
    assert job("--restart-rate", text).spec.restart_rate == rate


@pytest.mark.parametrize("text", ["5", "5/", "/10m", "-1/10m", "5/0", "5/10w", "five/1h", "5/nan", "5/-1"])
def test_what_is_no_rate(job: Load, text: str) -> None:
    assert refused(job, f"--restart-rate={text}").startswith("--restart-rate: expected a ")


def test_a_launcher_in_a_rank_does_not_take_over_the_outer_ones_checkpoints(job: Load) -> None:
    told = {"GPULAUNCH_CHECKPOINT_DIR": "outer", "GPULAUNCH_CONTROL": "/dev/shm/x/control.bin"}

    assert job(environ={"GPULAUNCH_CHECKPOINT_DIR": "mine"}).spec.checkpoint_dirs == ("mine",)
    assert job(environ=told).spec.checkpoint_dirs == ()


def test_checkpoints(job: Load) -> None:
    spec = job().spec
    assert (spec.resume, spec.checkpoint_dirs, spec.resume_arg) == ("auto", (), None)
    assert job("--checkpoint-dir", "a, s3://b/c").spec.checkpoint_dirs == ("a", "s3://b/c")
    assert "must not be empty" in refused(job, "--checkpoint-dir", "a,,b,")
    assert "must not be empty" in refused(job, "--resume", " ")


def test_the_grace_period(job: Load) -> None:
    variable = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}

    assert job().spec.grace_s == 30
    assert job(environ=variable).spec.grace_s == 7
    assert job("--shutdown-timeout", "0", environ=variable).spec.grace_s == 0
    assert refused(job, "--shutdown-timeout", "-1") == "--shutdown-timeout: must be at least 0, got -1"
    assert "whole number of seconds" in refused(job, environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"})
    assert refused(job, "--max-restarts", "-1") == "--max-restarts: must be at least 0, got -1"


@pytest.mark.parametrize(
    ("word", "method"), [("auto", "auto"), ("fork", "fork"), ("spawn", "spawn"), ("forkserver", "fork")]
)
def test_start_methods(job: Load, word: str, method: str) -> None:
    assert job("--start-method", word).spec.start_method == method


def test_preload(job: Load) -> None:
    assert job().spec.preload is None
    assert job("--preload", "none").spec.preload == ()
    assert job("--preload", "numpy, torch.nn").spec.preload == ("numpy", "torch.nn")
    assert refused(job, "--preload", "a-b").startswith("--preload: expected auto, none, or package names")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", None),
        ("0.0.0.0", "0.0.0.0", None),
        ("host:9500", "host", 9500),
        (":9500", "127.0.0.1", 9500),
        ("[::1]:9500", "::1", 9500),
        ("[::]", "::", None),
        ("127.0.0.1:0", "127.0.0.1", 0),
    ],
)
def test_metrics_addresses(job: Load, text: str, host: str, port: int | None) -> None:
    spec = job("--metrics-addr", text).spec

    assert (spec.metrics_host, spec.metrics_port) == (host, port)


@pytest.mark.parametrize("text", ["::1", "host:", "host:x", "host:70000", "[::1", "[::1]9", ":"])
def test_metrics_addresses_that_are_none(job: Load, text: str) -> None:
    assert refused(job, "--metrics-addr", text).startswith("--metrics-addr: ")


# -- GPUs


def test_the_job_files_cuda_visible_devices_is_what_the_ranks_have(job: Load, make_host: MakeHost) -> None:
    Path("job.toml").write_text("nproc = 'gpu'\n[env]\nCUDA_VISIBLE_DEVICES = '2,3'\n")
    on = make_host(gpus=4)

    assert job("--config", "job.toml", on=on).spec.nproc == 2
    assert job("--config", "job.toml", "--gpus", "1", on=on).spec.gpus == ("3",)
    assert "GPU 2 does not exist: 2 visible" in refused(job, "--config", "job.toml", "--gpus", "2", on=on)


@pytest.mark.parametrize(
    ("text", "inherited", "entries"),
    [
        ("0,2", None, ("0", "2")),
        ("3", None, ("3",)),
        ("1,0", "4,5,6,7", ("5", "4")),
        ("GPU-00000002", None, ("GPU-00000002",)),
        ("0", "GPU-00000003-aaaa", ("GPU-00000003-aaaa",)),
    ],
)
def test_gpus_become_cuda_visible_devices(
    job: Load, text: str, inherited: str | None, entries: tuple[str, ...], make_host: MakeHost
) -> None:
    environ = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    spec = job("--gpus", text, "--nproc", "gpu", environ=environ, on=make_host(gpus=4)).spec

    assert (spec.gpus, spec.visible_devices, spec.nproc) == (entries, entries, len(entries))


def test_a_mig_instance_is_named_by_its_uuid(job: Load, make_host: MakeHost, gpu: Callable[[int], Gpu]) -> None:
    slices = tuple(dataclasses.replace(gpu(0), uuid=f"MIG-{i}") for i in range(3))

    assert job("--gpus", "1,2", on=make_host(gpus=slices)).spec.gpus == ("MIG-1", "MIG-2")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("4", "--gpus: GPU 4 does not exist: 4 visible, numbered from 0"),
        ("0,0", "--gpus: GPU 0 is named twice"),
        ("0,GPU-00000000", "--gpus: GPU GPU-00000000 is named twice"),
        ("GPU-ff", "--gpus: no visible GPU has the UUID GPU-ff; `nvidia-smi -L` lists them"),
        ("all", "--gpus: expected indices or UUIDs (GPU-..., MIG-...) separated by commas, got 'all'"),
        ("", "--gpus: expected indices or UUIDs (GPU-..., MIG-...) separated by commas, got ''"),
    ],
)
def test_gpus_that_are_none(job: Load, text: str, line: str, make_host: MakeHost) -> None:
    assert refused(job, "--gpus", text, on=make_host(gpus=4)) == line


def test_gpus_where_there_are_none(job: Load) -> None:
    assert refused(job, "--gpus", "0") == "--gpus: there is no GPU here: no NVIDIA driver"


@pytest.mark.parametrize(("text", "fraction"), [("0.5", 0.5), ("1", 1.0), (".01", 0.01)])
def test_a_fraction_of_gpu_memory(job: Load, text: str, fraction: float) -> None:
    assert job("--gpu-memory-fraction", text).spec.gpu_memory_fraction == fraction


@pytest.mark.parametrize("text", ["0", "1.01", "-1", "nan", "inf", "half"])
def test_a_fraction_of_gpu_memory_that_is_none(job: Load, text: str) -> None:
    assert refused(job, "--gpu-memory-fraction", text).startswith("--gpu-memory-fraction: ")


@pytest.mark.parametrize(("text", "percent"), [("0", 0), ("0.25", 0.25), ("100", 100)])
def test_a_profile_budget_is_a_percentage(job, text, percent):
    assert job("--profile-budget", text).spec.profile_budget_percent == percent


@pytest.mark.parametrize("text", ["-1", "101", "nan", "half"])
def test_a_profile_budget_that_is_none_is_refused(job, text):
    assert refused(job, "--profile-budget", text).startswith("--profile-budget: ")


def test_virtual_local_rank_needs_a_visible_gpu_per_rank(job: Load) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}

    assert job("--virtual-local-rank", "--nproc", "2", environ=environ).spec.visible_devices == ("4", "5")
    assert refused(job, "--virtual-local-rank", "--nproc", "3", environ=environ) == (
        "--virtual-local-rank gives each rank its own GPU: 3 ranks, but CUDA_VISIBLE_DEVICES=4,5 names 2 GPUs"
    )


def test_numa_binding_without_a_gpu_to_be_near_to(job: Load, make_host: MakeHost) -> None:
    line = refused(job, "--numa-binding", "node")

    assert line == "--numa-binding node: binds ranks to the cores near their GPU, and there is no GPU: no NVIDIA driver"
    assert "3 ranks but 2 GPUs" in refused(job, "--numa-binding", "node", "--nproc", "3", on=make_host(gpus=2))
    assert "cannot read" in refused(job, "--numa-binding", "node", on=make_host(gpus=1, root="/nonexistent"))


def test_dry_run_is_asked_for_apart_from_the_job(job: Load) -> None:
    assert job("--dry-run").dry_run is True
    assert job().dry_run is False
    assert job(environ={"GPULAUNCH_DRY_RUN": "1"}).dry_run is True
