"""From what `srun` tells a task to its place in one job. The environments are as Slurm 22.05 has set them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.job import slurm
from gpulaunch.launcher.job.load import UsageError
from gpulaunch.launcher.job.plan import rank_args, rank_environment
from gpulaunch.launcher.job.spec import JobSpec, Request, SharedDir

Load = Callable[..., Request]

# Task 1 of `srun -N2 -n2`.
TWO_NODES = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "hpc",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_CPUS_ON_NODE": "8",
}
# Task 2 of `srun -N2 -n3`: the second of its host.
THREE_TASKS = {
    **TWO_NODES,
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}
# Task 5 of `srun -N1 -n8`.
ONE_NODE = {
    **TWO_NODES,
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "8",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "5",
}


def refused(job: Load, *words: str, environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        job(*words, environ=environ)
    line = str(caught.value)
    assert "\n" not in line
    return line


def of_rank(spec: JobSpec, local_rank: int = 0) -> dict[str, str]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    env = rank_environment(spec, local_rank=local_rank, attempt=0, master_port=1, error_file="", use_agent_store=True)
    return {name: env[name] for name in names if name in env}


# -- one job


def test_one_task_on_each_node_is_one_job_that_meets_on_the_first_node(job: Load) -> None:
    spec = job(environ=TWO_NODES).spec

    assert spec.elastic is not None
    assert (spec.elastic.min_nodes, spec.elastic.max_nodes, spec.nnodes, spec.nproc) == (2, 2, 2, 1)
    assert (spec.elastic.order, spec.node_rank, spec.elastic.leads) == (1, 1, False)
    assert spec.master_addr == "n2"
    assert spec.host_share is None
    assert (spec.run_id, spec.metrics_run) == ("4711.0", "4711.0")
    assert spec.shared_dir == SharedDir(name="train-hpc-4711.0", start=0)
    assert {spec.origins[name] for name in ("nnodes", "node-rank", "master-addr", "master-port", "rdzv-id")} == {
        "detected: Slurm step 4711.0"
    }


def test_all_tasks_know_one_place_and_only_the_first_leads(job: Load) -> None:
    tasks = [
        {**THREE_TASKS, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
        {**THREE_TASKS, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        THREE_TASKS,
    ]

    specs = [job(environ=environ).spec for environ in tasks]

    assert len({(spec.master_addr, spec.master_port, spec.run_id, spec.nnodes, spec.shared_dir) for spec in specs}) == 1
    assert [spec.elastic.leads for spec in specs if spec.elastic is not None] == [True, False, False]
    assert [spec.node_rank for spec in specs] == [0, 1, 2]
    assert [of_rank(spec) for spec in specs] == [
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
    ]


def test_where_task_0_is_not_on_the_first_host_the_first_task_there_leads(job: Load) -> None:
    """--distribution=arbitrary: the list of hosts is sorted, and only the number of the host tells who is first."""
    first = {**TWO_NODES, "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    task_0 = {**TWO_NODES, "SLURM_PROCID": "0", "SLURM_NODEID": "1"}

    leads = [job(environ=environ).spec.elastic.leads for environ in (first, task_0)]

    assert leads == [True, False]


def test_tasks_of_one_host_meet_on_it_alone(job: Load) -> None:
    spec = job(environ=ONE_NODE).spec

    assert (spec.master_addr, spec.nnodes, spec.nproc) == ("localhost", 8, 1)
    assert of_rank(spec) == {
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }


@pytest.mark.parametrize(
    ("words", "environ", "least", "most"),
    [
        (["--nnodes", "1:2"], TWO_NODES, 1, 2),
        (["--nnodes", "2"], TWO_NODES, 2, 2),
        (["--nnodes", "1:2"], {**TWO_NODES, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
                               "SLURM_STEP_NODELIST": "n[2-4]"}, 1, 2),  # the third stands by
        ([], {**TWO_NODES, "PET_NNODES": "1:2"}, 1, 2),
    ],
)  # fmt: skip
def test_fewer_nodes_may_do_where_the_user_says_so(
    job: Load, words: list[str], environ: dict[str, str], least: int, most: int
) -> None:
    elastic = job(*words, environ=environ).spec.elastic

    assert elastic is not None
    assert (elastic.min_nodes, elastic.max_nodes, elastic.order) == (least, most, 1)


def test_the_place_to_meet_and_the_name_of_the_run_may_be_given(job: Load) -> None:
    words = ["--master-addr", "ib-n2", "--master-port", "3000", "--rdzv-id", "mine", "--job-dir", "d", "--nnodes", "2"]

    spec = job(*words, environ=TWO_NODES).spec

    assert (spec.master_addr, spec.master_port, spec.run_id, spec.nnodes) == ("ib-n2", 3000, "mine", 2)
    assert (spec.metrics_run, spec.job_dir, spec.origins["master-port"]) == ("mine", "d", "command line")


# -- alone, or told its place


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TWO_NODES, "SLURM_STEP_ID": "4294967291"}, []),  # the batch script
        ({**TWO_NODES, "SLURM_STEP_ID": "4294967290"}, []),  # salloc's shell, where the site makes it a step
        ({name: value for name, value in TWO_NODES.items() if "STEP" not in name}, []),  # salloc's shell elsewhere
        ({**TWO_NODES, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, []),
        ({**TWO_NODES, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, []),  # a step of one task in a job of eight
        ({**TWO_NODES, "SLURM_PTY_PORT": "40000", "SLURM_PTY_WIN_COL": "80"}, []),  # srun --ntasks=2 --pty bash
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "x"}, []),  # in a rank of a launcher that knew its place
        (TWO_NODES, ["--nnodes", "1"]),
        (TWO_NODES, ["--standalone"]),
        ({**TWO_NODES, "SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, []),  # a step in one part of such a job
    ],
)
def test_a_launcher_that_is_alone_is_a_job_of_its_own(job: Load, environ: dict[str, str], words: list[str]) -> None:
    spec = job(*words, environ=environ).spec

    assert (spec.nproc, spec.nnodes, spec.elastic, spec.host_share, spec.shared_dir) == (1, 1, None, None, None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TWO_NODES, ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n1"]),
        ({**TWO_NODES, "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n1"}, []),
        (TWO_NODES, ["--nnodes", "2", "--rdzv-endpoint", "n1:3000"]),
    ],
)
def test_what_the_user_says_of_the_nodes_counts(job: Load, environ: dict[str, str], words: list[str]) -> None:
    spec = job(*words, environ=environ).spec

    assert (spec.nnodes, spec.master_addr, spec.shared_dir) == (2, "n1", None)
    assert spec.elastic is None or spec.elastic.leads is None


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        ([], {**TWO_NODES, "SLURM_HET_SIZE": "2"}, "a heterogeneous job of Slurm is not read from its variables"),
        ([], {n: v for n, v in TWO_NODES.items() if n != "SLURM_NODEID"}, "but SLURM_NODEID is missing"),
        ([], {**TWO_NODES, "SLURM_STEP_NODELIST": "n[2-"}, "not a list of hosts: 'n[2-'"),
        ([], {**TWO_NODES, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "contradict each other"),
        ([], {**TWO_NODES, "SLURM_STEP_NUM_TASKS": "4"}, "contradict each other"),
        ([], {**TWO_NODES, "SLURM_LOCALID": "1"}, "contradict each other"),
        (["--nnodes", "3"], TWO_NODES, "--nnodes: 3 nodes, but srun starts 2 tasks"),
        (["--nnodes", "1:3"], TWO_NODES, "--nnodes: 3 nodes, but srun starts 2 tasks"),
        (["--nnodes", "2:3"], THREE_TASKS, "fewer nodes than tasks need one task for each node"),
        (["--nproc", "gpu"], ONE_NODE, "--nproc gpu: 8 tasks of srun share this host"),
        (["--nproc", "auto"], ONE_NODE, "--nproc auto: 8 tasks of srun share this host"),
    ],
)
def test_what_cannot_be_one_job_is_refused_with_one_line(
    job: Load, words: list[str], environ: dict[str, str], says: str
) -> None:
    assert says in refused(job, *words, environ=environ)


# -- ranks, GPUs and cores


def test_one_task_for_a_node_starts_a_rank_for_each_of_its_gpus(job: Load, make_host: Callable[..., object]) -> None:
    host = make_host(gpus=4)

    assert job(environ=TWO_NODES, on=host).spec.nproc == 4
    assert job("--nproc", "2", environ=TWO_NODES, on=host).spec.nproc == 2
    assert job(environ={**TWO_NODES, "ROCR_VISIBLE_DEVICES": "0,1,2"}).spec.nproc == 3
    assert job(environ={**TWO_NODES, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}).spec.nproc == 1


@pytest.mark.parametrize(
    ("visible", "on_node", "words", "first", "size"),
    [
        # All tasks see all GPUs (--gres=gpu:8): each takes its own.
        ("0,1,2,3,4,5,6,7", "8", [], 5, 8),
        ("0,1,2,3,4,5,6,7", None, [], 5, 8),
        # Each sees its own (--gpus-per-task=1, --gpu-bind=single:1): by device cgroup it is number 0, else another.
        ("5", "8", [], 0, 8),
        ("0", "8", [], 0, 8),
        # --gpus-per-task=2, for one rank or two.
        ("10,11", "16", [], 0, 8),
        ("10,11", "16", ["--nproc", "2"], 0, 16),
        ("10,11", "16", ["--nproc", "gpu"], 0, 16),
        # --gpu-bind=closest on two sockets: the tasks of a socket see its four GPUs.
        ("4,5,6,7", "8", [], 1, 8),
        # One GPU for all: it is the only one that there is.
        ("0", "1", [], 0, 8),
        # No GPU, or a site that does not manage them.
        (None, None, [], 5, 8),
        ("NoDevFiles", None, [], 5, 8),
        (None, None, ["--nproc", "2"], 10, 16),
    ],
)  # fmt: skip
def test_local_rank_is_the_number_of_a_gpu_that_the_task_sees(
    job: Load, visible: str | None, on_node: str | None, words: list[str], first: int, size: int
) -> None:
    given_by_slurm = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": on_node}
    environ = {**ONE_NODE, **{name: value for name, value in given_by_slurm.items() if value is not None}}
    if "gpu" in words:
        words = ["--nproc", str(slurm.num_visible(environ))]  # there is no NVML here

    spec = job(*words, environ=environ).spec

    assert [of_rank(spec, each)["LOCAL_RANK"] for each in range(spec.nproc)] == [
        str(first + each) for each in range(spec.nproc)
    ]
    assert of_rank(spec)["LOCAL_WORLD_SIZE"] == str(size)
    assert "CUDA_VISIBLE_DEVICES" not in of_rank(spec)  # as Slurm has set it


def test_what_is_known_of_a_rank_is_of_its_own_gpu(job: Load, make_host: Callable[..., object]) -> None:
    environ = {**ONE_NODE, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}

    spec = job(environ=environ, on=make_host(gpus=8)).spec
    virtual = job("--virtual-local-rank", environ=environ, on=make_host(gpus=8)).spec

    assert [card.index for card in spec.cards] == [5]
    assert [card.index for card in virtual.cards] == [5]
    assert (of_rank(virtual)["LOCAL_RANK"], of_rank(virtual)["CUDA_VISIBLE_DEVICES"]) == ("0", "5")


def test_local_rank_in_an_argument_is_that_of_the_variable(job: Load) -> None:
    spec = job("train.py", "--device=${local_rank}", environ=ONE_NODE).spec

    assert "--device=5" in rank_args(spec, 0)


@pytest.mark.parametrize(
    ("cores", "on_node", "threads"),
    [
        (64, "64", 8),  # all tasks may use all cores
        (128, "64", 8),  # and cores that are not even the step's
        (8, "64", None),  # each has its own: one rank, which may use them all
        (8, None, 1),
    ],
)
def test_threads_of_a_rank_are_the_cores_of_its_task(
    job: Load, make_host: Callable[..., object], cores: int, on_node: str | None, threads: int | None
) -> None:
    environ = {name: value for name, value in ONE_NODE.items() if name != "SLURM_CPUS_ON_NODE"}
    environ |= {"SLURM_CPUS_ON_NODE": on_node} if on_node else {}

    assert job(environ=environ, on=make_host(cores=cores)).spec.omp_num_threads == threads


# -- the port


@given(st.integers(1, 1 << 31), st.integers(0, 1 << 20), st.integers(0, 100))
def test_the_port_is_none_that_linux_gives_to_connections_or_torchrun_uses(job: int, step: int, restart: int) -> None:
    port = _task(job, step, restart).meeting_port

    assert 1024 < port < 32768
    assert port not in (29400, 29500)


@given(st.integers(1, 1 << 31), st.integers(0, 15), st.integers(1, 500))
def test_neighbouring_jobs_and_steps_have_ports_of_their_own(job: int, step: int, later: int) -> None:
    port = _task(job, step, 0).meeting_port

    assert port not in [_task(job, other, 0).meeting_port for other in range(16) if other != step]
    assert port not in [_task(job + later, other, 0).meeting_port for other in range(16)]
    assert port not in [_task(job, step, restart).meeting_port for restart in range(1, 100)]


def _task(job: int, step: int, restart: int) -> slurm.Task:
    return slurm.Task(
        job=job,
        step=step,
        restart=restart,
        cluster="",
        rank=0,
        num_tasks=2,
        host=0,
        hosts=("a", "b"),
        local_id=0,
        tasks_per_host=(1, 1),
    )


def test_a_requeued_job_keeps_its_name_and_directory(job: Load) -> None:
    first, again = (job(environ={**TWO_NODES, **more}).spec for more in ({}, {"SLURM_RESTART_COUNT": "1"}))

    assert first.shared_dir is not None
    assert again.shared_dir == SharedDir(name=first.shared_dir.name, start=1)
    assert first.run_id == again.run_id
    assert first.master_port != again.master_port


# -- lists of hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-03,7],x1", "gpu01 gpu02 gpu03 gpu7 x1"),
        ("n1", "n1"),
        ("a,b", "a b"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("r[1-2]n[0-1]-ib", "r1n0-ib r1n1-ib r2n0-ib r2n1-ib"),
        ("n[1,3,5-6]", "n1 n3 n5 n6"),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: str) -> None:
    assert list(slurm.expand(text)) == hosts.split()


@pytest.mark.parametrize("text", ["", "n[", "n[1-", "n]", "n[2-1]", "n[a-b]", "n[]", "a,,b", "n[1-99999999]", "n[[1]]"])
def test_what_is_no_list_of_hosts_is_not_guessed_at(text: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        slurm.expand(text)


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True)
_RANGES = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=4
)  # first, how many more, width


@given(st.lists(st.tuples(_NAMES, _RANGES | st.none(), st.sampled_from(["", "-ib"])), min_size=1, max_size=5))
def test_every_host_is_found_in_the_order_of_the_list(items: list) -> None:
    texts: list[str] = []
    hosts: list[str] = []
    for name, ranges, suffix in items:
        if ranges is None:
            texts.append(name + suffix)
            hosts.append(name + suffix)
            continue
        parts = [f"{low:0{width}}" + (f"-{low + more:0{width}}" if more else "") for low, more, width in ranges]
        texts.append(f"{name}[{','.join(parts)}]{suffix}")
        hosts += [
            f"{name}{number:0{max(width, len(str(low)))}}{suffix}"
            for low, more, width in ranges
            for number in range(low, low + more + 1)
        ]

    assert list(slurm.expand(",".join(texts))) == hosts


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_numbers_of_tasks_are_repeated(numbers: list[int]) -> None:
    runs = [(number, len(list(group))) for number, group in itertools.groupby(numbers)]
    text = ",".join(f"{number}(x{times})" if times > 1 else f"{number}" for number, times in runs)

    assert list(slurm.repeated(text)) == numbers


@pytest.mark.parametrize("text", ["", "2(x", "a", "2(x3)1", "2,,1", "-1"])
def test_what_are_no_numbers_of_tasks_are_not_guessed_at(text: str) -> None:
    with pytest.raises(ValueError, match="tasks"):
        slurm.repeated(text)
