"""The table of all options, from which are made: the parser, the environment names, the job file's keys and types, the
fields of `JobSpec`, the help text and the suggestions for misspelt names.

torchrun's options keep torchrun's spelling (dash and underscore), defaults, value types and PET_ variables. Ours follow
the same form with GPULAUNCH_ variables.
"""

from __future__ import annotations

import os

from gpulaunch.launcher.job.options import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    NUMBERS,
    STRING_OR_INTEGER,
    STRINGS,
    Option,
    at_least,
    choice,
    directories,
    fraction,
    if_given,
    integer,
    logs_specs,
    not_empty,
    number,
    packages,
    percent,
    rank_filter,
    rate,
    signal_names,
    words,
)

RANKS = "Ranks and nodes"
PROGRAM = "The program"
DEVICES = "Devices and cores"
OUTPUT = "Output"
FAILURE = "Restart and shutdown"
CHECKPOINTS = "Checkpoints and preemption"
HANGS = "Hangs"
START = "Start"
METRICS = "Profiler and metrics"
JOB = "The job"
RENDEZVOUS = "Rendezvous (as in torchrun)"
SECTIONS = (RANKS, PROGRAM, JOB, DEVICES, OUTPUT, FAILURE, CHECKPOINTS, HANGS, START, METRICS, RENDEZVOUS)

PROFILE_BUDGET = 0.5
"""In percent; the probe's default (`profiler.probe.budget`)."""

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option(name="nproc-per-node", also=("nproc",), section=RANKS, metavar="N", default="1", toml=STRING_OR_INTEGER,
           help="ranks on this node: a number, `gpu` (one per GPU), `cpu` (one per core), `xpu`, or `auto` "
                "(GPUs if any, else cores)"),
    Option(name="nnodes", section=RANKS, metavar="N", default="1:1", toml=STRING_OR_INTEGER,
           help="number of nodes, N or MIN:MAX; run the same command on each"),
    Option(name="node-rank", section=RANKS, metavar="R", convert=integer, default=0, toml=INTEGER,
           help="rank of this node, from 0; with --rdzv-endpoint nodes are numbered without it"),
    Option(name="master-addr", section=RANKS, metavar="HOST", default="127.0.0.1",
           help="address of node 0; IPv6 as [::1]"),
    Option(name="master-port", section=RANKS, metavar="PORT", convert=integer, toml=INTEGER,
           help="port on node 0 for the ranks' store (one node: a free one; several: 29500)"),

    Option(name="module", short="m", section=PROGRAM, default=False, toml=BOOLEAN,
           help="PROGRAM is a module name, run as `python -m` does"),
    Option(name="no-python", section=PROGRAM, default=False, toml=BOOLEAN,
           help="PROGRAM is a command: run it without python"),
    Option(name="run-path", section=PROGRAM, default=False, toml=BOOLEAN,
           help="run PROGRAM with runpy.run_path"),

    Option(name="config", section=JOB, metavar="FILE", ours=True,
           help="job file (TOML): script, args, any long option as a key, an [env] table; "
                "environment and command line take precedence"),
    Option(name="name", section=JOB, metavar="NAME", ours=True,
           help="name of the job (default: from the program)"),
    Option(name="job-dir", section=JOB, metavar="DIR", ours=True, field="job_dir",
           help="run directory (default: ./gpulaunch-runs/<name>-<time>)"),
    Option(name="dry-run", section=JOB, default=False, toml=BOOLEAN, ours=True,
           help="print the plan, with each rank's command and environment and the source of every value; "
                "start nothing"),

    Option(name="gpus", section=DEVICES, metavar="LIST", toml=NUMBERS, ours=True,
           help="GPUs to use: indices (of the visible ones) or UUIDs, such as 0,2"),
    Option(name="gpu-memory-fraction", section=DEVICES, metavar="F", convert=number, toml=NUMBER, ours=True,
           field="gpu_memory_fraction", check=fraction,
           help="limit each rank's GPU memory to this fraction of its GPU, 0 < F <= 1"),
    Option(name="virtual-local-rank", section=DEVICES, default=False, toml=BOOLEAN, field="virtual_local_rank",
           help="each rank sees its own GPU only, as device 0, and LOCAL_RANK=0"),
    Option(name="numa-binding", section=DEVICES, metavar="MODE",
           convert=choice("node", "socket", "exclusive", "core-complex"), field="numa_binding",
           help="bind each rank to the cores near its GPU: node, socket, exclusive or core-complex"),

    Option(name="console", section=OUTPUT, metavar="WHICH", default="all", toml=NUMBERS, ours=True,
           help="local ranks whose output is shown: all, none, or a list such as 0,3 or 0-3; "
                "the files of all ranks are complete"),
    Option(name="redirects", short="r", section=OUTPUT, metavar="STD", default="0", toml=STRING_OR_INTEGER,
           help="streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank, 0:3,1:1"),
    Option(name="tee", short="t", section=OUTPUT, metavar="STD", default="0", toml=STRING_OR_INTEGER,
           help="streams that go to files and to the console; same form as --redirects"),
    Option(name="local-ranks-filter", section=OUTPUT, metavar="LIST", default="", toml=NUMBERS,
           field="local_ranks_filter", check=rank_filter,
           help="show only these local ranks on the console"),
    Option(name="log-line-prefix-template", section=OUTPUT, metavar="TEXT", default="",
           help="prefix of each line of streams selected by --tee, and of no others, with ${role_name}, "
                "${rank}, ${local_rank} and ${hostname} "
                "(default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE or [${role_name}${local_rank}]:)"),
    Option(name="duplicate-stdout-filters", section=OUTPUT, metavar="WORDS", convert=words, default=(), toml=STRINGS,
           field="duplicate_stdout_filters", check=tuple,
           help="copy stdout lines that contain one of these words to a separate file "
                "(comma separated, `,,` for a comma)"),
    Option(name="duplicate-stderr-filters", section=OUTPUT, metavar="WORDS", convert=words, default=(), toml=STRINGS,
           field="duplicate_stderr_filters", check=tuple,
           help="the same for stderr"),
    Option(name="log-dir", section=OUTPUT, metavar="DIR", field="log_dir",
           help="torchrun's log directory; the run directory goes there"),
    Option(name="role", section=OUTPUT, metavar="NAME", default="default", field="role",
           help="role of the ranks, shown in front of their lines"),
    Option(name="logs-specs", section=OUTPUT, metavar="NAME", field="logs_specs", check=logs_specs,
           help="entry point of group torchrun.logs_specs"),
    Option(name="event-log-handler", section=OUTPUT, metavar="NAME", default="null", field="event_log_handler",
           help="name of a registered event log handler"),

    Option(name="max-restarts", section=FAILURE, metavar="K", convert=integer, default=0, toml=INTEGER,
           field="max_restarts", check=at_least(0),
           help="restart all ranks at most K times after a failure"),
    Option(name="restart-rate", section=FAILURE, metavar="N/TIME", ours=True, field="restart_rate", check=rate,
           help="and at most N times within any TIME, such as 5/10m (s, m, h, d)"),
    Option(name="restart-backoff", section=FAILURE, metavar="SECONDS", convert=number, default=60.0, toml=NUMBER,
           ours=True, field="restart_backoff_s", check=at_least(0),
           help="longest pause before a restart; there is none before the first, and it grows only without progress"),
    Option(name="no-progress-limit", section=FAILURE, metavar="N", convert=integer, toml=INTEGER, ours=True,
           field="no_progress_limit", check=if_given(at_least(0)),
           help="give up after N failures in a row without progress; 0: never "
                "(default: 3 after a step; before the first step, only --max-restarts applies)"),
    Option(name="failure-grace", section=FAILURE, metavar="SECONDS", convert=number, default=1.0, toml=NUMBER,
           ours=True, field="failure_grace_s", check=at_least(0),
           help="time for the other ranks to exit after one has failed, before SIGKILL"),
    Option(name="shutdown-timeout", section=FAILURE, metavar="SECONDS", convert=integer, toml=INTEGER,
           help="time for ranks to exit after a request to end, before SIGKILL "
                "(default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)"),
    Option(name="leftovers", section=FAILURE, metavar="WHAT", default="leave", ours=True,
           convert=choice("leave", "wait", "end"), field="leftovers",
           help="child processes still running after all ranks exited with 0: leave them running (as torchrun does), "
                "wait for them, or end them; after a failure or a signal they are ended"),
    Option(name="signals-to-handle", section=FAILURE, metavar="NAMES", toml=STRINGS,
           default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", field="signals", check=signal_names,
           help="signals that end the job and are forwarded to the ranks"),
    Option(name="monitor-interval", section=FAILURE, metavar="SECONDS", convert=number, default=0.1, toml=NUMBER,
           field="monitor_interval_s", check=at_least(0),
           help="accepted for torchrun, without effect: the agent does not poll"),

    Option(name="resume", section=CHECKPOINTS, metavar="WHAT", default="auto", ours=True,
           field="resume", check=not_empty,
           help="auto: resume from the newest complete checkpoint; never; or the path of one to start with"),
    Option(name="resume-arg", section=CHECKPOINTS, metavar="TEXT", ours=True, field="resume_arg",
           help="arguments added when there is a checkpoint, such as '--resume {path}'; or transformers, lightning"),
    Option(name="checkpoint-dir", section=CHECKPOINTS, metavar="DIRS", toml=STRINGS, ours=True,
           field="checkpoint_dirs", check=directories,
           help="where to search for checkpoints: directories or fsspec URLs (default: <job-dir>/checkpoints)"),
    Option(name="replicate", section=CHECKPOINTS, default=False, toml=BOOLEAN, ours=True, field="replicate",
           help="several nodes, each with a checkpoint directory of its own (a local disk, /dev/shm): "
                "gpulaunch.checkpoint keeps whole checkpoints on every node"),
    Option(name="checkpoint-pattern", section=CHECKPOINTS, metavar="GLOB", ours=True, field="checkpoint_pattern",
           help="pattern of the program's checkpoints, such as 'model_{step}.pt', if no known format matches"),
    Option(name="resume-search-timeout", section=CHECKPOINTS, metavar="SECONDS", convert=number, default=600.0,
           toml=NUMBER, ours=True, field="resume_search_s", check=at_least(0),
           help="time to verify the content of checkpoints before a start; then the newest with a complete structure "
                "is used, and verified in the background (0: at once)"),
    Option(name="preempt-signals", section=CHECKPOINTS, metavar="NAMES", default="SIGTERM,SIGUSR1", toml=STRINGS,
           ours=True,
           help="signals after which the ranks save at the next step and the job ends with 75 (run it again)"),
    Option(name="notify-signals", section=CHECKPOINTS, metavar="NAMES", default="SIGUSR2", toml=STRINGS, ours=True,
           help="signals after which the ranks save at the next step and continue"),

    Option(name="on-hang", section=HANGS, metavar="WHAT", default="restart", ours=True,
           convert=choice("restart", "stop", "report"), field="on_hang",
           help="what to do when the ranks hang: restart them (within --max-restarts), stop, or only report it"),
    Option(name="hang-timeout", section=HANGS, metavar="SECONDS", convert=number, default=600.0, toml=NUMBER, ours=True,
           field="hang_timeout_s", check=at_least(0),
           help="ranks without progress for this time hang; a proven hang is acted on at once (0: no hang detection)"),
    Option(name="first-step-timeout", section=HANGS, metavar="SECONDS", convert=number, default=3600.0, toml=NUMBER,
           ours=True, field="first_step_timeout_s", check=at_least(0),
           help="the same before the end of the first step: loading of models, preparation of data"),

    Option(name="start-method", section=START, metavar="HOW", default="auto",
           convert=choice("auto", "fork", "spawn", "forkserver"),
           field="start_method", check=lambda how: "fork" if how == "forkserver" else how,
           help="fork ranks from a process that has torch loaded, spawn them, or choose (auto); forkserver means fork"),
    Option(name="preload", section=START, metavar="PKGS", default="auto", toml=STRINGS, ours=True,
           field="preload", check=packages,
           help="packages to import once before forking: auto (read from the script), none, or a list"),

    Option(name="no-profile", section=METRICS, default=False, toml=BOOLEAN, ours=True,
           field="profile", check=lambda off: not off,
           help="disable the profiler and metrics; hangs are then detected only for ranks stopped by a signal"),
    Option(name="profile-budget", section=METRICS, metavar="PERCENT", convert=number, default=PROFILE_BUDGET,
           toml=NUMBER, ours=True, field="profile_budget_percent", check=percent,
           help="maximum share of a step's time that the profiler may take in a rank; above it, only some steps are "
                "observed (0: no limit)"),
    Option(name="metrics-addr", section=METRICS, metavar="HOST:PORT", default="", ours=True,
           help="address of /metrics (default: 127.0.0.1, first free port from 9464); "
                "also HOST, :PORT or [::1]:PORT"),
    Option(name="metrics-web-config", section=METRICS, metavar="FILE", default="", ours=True,
           field="metrics_web_config", check=lambda path: os.path.abspath(path) if path else "",
           help="protect that address with TLS or a token: a Prometheus web configuration file; docs/page.md"),
    Option(name="metrics-sd", section=METRICS, metavar="DIR", default="", ours=True, field="metrics_sd",
           help="announce this node's metrics to Prometheus by a file in DIR while the job runs (file_sd)"),
    Option(name="metrics-push", section=METRICS, metavar="URL", default="", ours=True, field="metrics_push",
           help="push the last values to this Pushgateway at the end"),
    Option(name="metrics-otlp", section=METRICS, metavar="URL", default="", ours=True, field="metrics_otlp",
           help="send metrics to this OpenTelemetry collector, every 15 s (pip install 'gpulaunch[otlp]')"),

    Option(name="standalone", section=RENDEZVOUS, default=False, toml=BOOLEAN,
           help="one node with a free port; other rendezvous options are ignored"),
    Option(name="rdzv-backend", section=RENDEZVOUS, metavar="NAME", default="static",
           help="static; leader (also c10d), the default for several nodes with --rdzv-endpoint; or etcd (v3), which "
                "survives the loss of any node"),
    Option(name="rdzv-endpoint", section=RENDEZVOUS, metavar="HOST:PORT", default="",
           help="where the nodes meet: the leader's host and port, or etcd's, HOST:PORT,HOST:PORT"),
    Option(name="rdzv-id", section=RENDEZVOUS, metavar="ID", default="none",
           help="id of the run"),
    Option(name="rdzv-conf", section=RENDEZVOUS, metavar="K=V,...", default="",
           help="times in seconds: join_timeout=600, last_call_timeout=30, away_timeout=60; timeout=900 for static; "
                "for etcd also protocol=https, cacert, cert, key, user, password_file, etcd_prefix"),
    Option(name="token-file", section=RENDEZVOUS, metavar="FILE", default="", ours=True, field="token_file",
           help="a secret that all nodes share, at least 16 bytes; without it, anyone who can connect can join"),
    Option(name="insecure", section=RENDEZVOUS, default=False, toml=BOOLEAN, ours=True, field="insecure",
           help="do not warn that there is no --token-file"),
    Option(name="local-addr", section=RENDEZVOUS, metavar="HOST",
           help="address of this node"),
)
# fmt: on

BY_KEY: dict[str, Option] = {name: option for option in OPTIONS for name in option.names}
