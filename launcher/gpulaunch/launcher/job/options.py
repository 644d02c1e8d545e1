"""The table of all options, from which are made: the parser, the environment names, the job file's keys and types, the
help text and the suggestions for misspelt names.

torchrun's options keep torchrun's spelling (dash and underscore), defaults, value types and PET_ variables. Ours follow
the same form with GPULAUNCH_ variables. A value has the same form in every source: the command line and the environment
give text, the job file gives a typed value that is first converted to that text; then one converter per option reads
it. So no source can express something another cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

VERBS = ("chaos", "compare", "doctor", "export", "flame", "report", "runs", "top", "trace")
"""Subcommands: as the first word they select another action than running a program."""


class UsageError(Exception):
    """The user asked for something impossible; `str()` is the one line to print."""

    exit_code = 2


class TryLaterError(UsageError):
    """The job needs something that another process uses for now: the same command may succeed later."""

    exit_code = 69
    """EX_UNAVAILABLE of sysexits.h."""


Converter = Callable[[str], object]


def text(value: str) -> str:
    """The value unchanged."""
    return value


def integer(value: str) -> int:
    """A whole number, in any notation that Python's int() accepts, as in torchrun."""
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"expected a whole number, got {value!r}") from None


def number(value: str) -> float:
    """A finite number."""
    try:
        result = float(value)
    except ValueError:
        result = float("nan")
    if not -float("inf") < result < float("inf"):
        raise UsageError(f"expected a number, got {value!r}")
    return result


def words(value: str) -> list[str]:
    """Comma-separated items; `,,` is a comma inside an item, as in torchrun's --duplicate-stdout-filters."""
    return [word.replace("\0", ",") for word in value.replace(",,", "\0").split(",")]


def choice(*allowed: str) -> Converter:
    """A converter that accepts only one of these words."""

    def convert(value: str) -> str:
        if value not in allowed:
            raise UsageError(f"{value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return value

    return convert


STRING = ("string",)
INTEGER = ("integer",)
NUMBER = ("number", "integer")
BOOLEAN = ("boolean",)
STRING_OR_INTEGER = ("string", "integer")
STRINGS = ("string", "list")
NUMBERS = ("string", "integer", "list")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its spelling in each source, its value, and its meaning."""

    name: str
    """Long name without the dashes, in dash spelling; also the job file's key."""
    also: tuple[str, ...] = ()
    """Other long names with the same meaning."""
    short: str = ""
    section: str
    help: str
    metavar: str = ""
    """Empty for a flag that takes no value."""
    convert: Converter = text
    default: object = None
    toml: tuple[str, ...] = STRING
    """The TOML types that a job file may give."""
    ours: bool = False
    """Not one of torchrun's: its environment variable starts with GPULAUNCH_."""

    @property
    def dest(self) -> str:
        """Attribute of the parsed namespace."""
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return not self.metavar

    @property
    def names(self) -> tuple[str, ...]:
        """Every long name, dash and underscore spelling, without the dashes."""
        return tuple(dict.fromkeys(s for n in (self.name, *self.also) for s in (n, n.replace("-", "_"))))

    @property
    def torchrun_strings(self) -> tuple[str, ...]:
        """The option strings that torchrun also has; its abbreviations must keep their meaning."""
        return () if self.ours else tuple(f"--{n}" for n in dict.fromkeys((self.name, self.dest)))

    @property
    def option_strings(self) -> tuple[str, ...]:
        """The accepted strings, preferred spelling first."""
        return (*((f"-{self.short}",) if self.short else ()), *(f"--{n}" for n in self.names))

    @property
    def environment(self) -> tuple[str, ...]:
        """Names of the environment variables that set it; a name that torchrun lacks gets our prefix."""
        first = f"{'GPULAUNCH' if self.ours else 'PET'}_{self.dest.upper()}"
        return (first, *(f"GPULAUNCH_{n.replace('-', '_').upper()}" for n in self.also))


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
"""In percent; the probe's default (`profiler.probe.price`)."""

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option(name="nproc-per-node", also=("nproc",), section=RANKS, metavar="N", default="1", toml=STRING_OR_INTEGER,
           help="ranks on this node: a number, `gpu` (one per GPU), `cpu` (one per core), `xpu`, or `auto` "
                "(GPUs if any, else cores)"),
    Option(name="nnodes", section=RANKS, metavar="N", default="1:1", toml=STRING_OR_INTEGER,
           help="number of nodes; run the same command on each with its own --node-rank"),
    Option(name="node-rank", section=RANKS, metavar="R", convert=integer, default=0, toml=INTEGER,
           help="rank of this node, from 0"),
    Option(name="master-addr", section=RANKS, metavar="HOST", default="127.0.0.1",
           help="address of node 0; IPv6 as [::1]"),
    Option(name="master-port", section=RANKS, metavar="PORT", convert=integer, toml=INTEGER,
           help="port on node 0 for the ranks' store (one node: a free one; several: 29500)"),

    Option(name="module", short="m", section=PROGRAM, default=False, toml=BOOLEAN,
           help="PROGRAM is a module name, run as `python -m` does"),
    Option(name="no-python", section=PROGRAM, default=False, toml=BOOLEAN,
           help="PROGRAM is a command of its own: run it without python"),
    Option(name="run-path", section=PROGRAM, default=False, toml=BOOLEAN,
           help="run PROGRAM with runpy.run_path"),

    Option(name="config", section=JOB, metavar="FILE", ours=True,
           help="job file (TOML): script, args, any long option as a key, an [env] table; "
                "environment and command line win over it"),
    Option(name="name", section=JOB, metavar="NAME", ours=True,
           help="name of the job (default: from the program)"),
    Option(name="job-dir", section=JOB, metavar="DIR", ours=True,
           help="run directory (default: ./gpulaunch-runs/<name>-<time>)"),
    Option(name="dry-run", section=JOB, default=False, toml=BOOLEAN, ours=True,
           help="print the plan, with each rank's command and environment and where every value came from; "
                "start nothing"),

    Option(name="gpus", section=DEVICES, metavar="LIST", toml=NUMBERS, ours=True,
           help="GPUs to use: indices (of the visible ones) or UUIDs, such as 0,2"),
    Option(name="gpu-memory-fraction", section=DEVICES, metavar="F", convert=number, toml=NUMBER, ours=True,
           help="cap each rank's GPU memory at this fraction of its card, 0 < F <= 1"),
    Option(name="virtual-local-rank", section=DEVICES, default=False, toml=BOOLEAN,
           help="each rank sees its own GPU only, as device 0, and LOCAL_RANK=0"),
    Option(name="numa-binding", section=DEVICES, metavar="MODE",
           convert=choice("node", "socket", "exclusive", "core-complex"),
           help="bind each rank to the cores near its GPU: node, socket, exclusive or core-complex"),

    Option(name="console", section=OUTPUT, metavar="WHICH", default="all", toml=NUMBERS, ours=True,
           help="local ranks whose output is shown: all, none, or a list such as 0,3 or 0-3; "
                "every rank's own files stay complete"),
    Option(name="redirects", short="r", section=OUTPUT, metavar="STD", default="0", toml=STRING_OR_INTEGER,
           help="streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank, 0:3,1:1"),
    Option(name="tee", short="t", section=OUTPUT, metavar="STD", default="0", toml=STRING_OR_INTEGER,
           help="streams that go to files and to the console; same form as --redirects"),
    Option(name="local-ranks-filter", section=OUTPUT, metavar="LIST", default="", toml=NUMBERS,
           help="show only these local ranks on the console"),
    Option(name="log-line-prefix-template", section=OUTPUT, metavar="TEXT", default="",
           help="what stands before each line of a stream that --tee names, and of no other, with ${role_name}, "
                "${rank}, ${local_rank} and ${hostname} "
                "(default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE or [${role_name}${local_rank}]:)"),
    Option(name="duplicate-stdout-filters", section=OUTPUT, metavar="WORDS", convert=words, default=(), toml=STRINGS,
           help="copy stdout lines that contain one of these words to a file of their own "
                "(comma separated, `,,` for a comma)"),
    Option(name="duplicate-stderr-filters", section=OUTPUT, metavar="WORDS", convert=words, default=(), toml=STRINGS,
           help="the same for stderr"),
    Option(name="log-dir", section=OUTPUT, metavar="DIR",
           help="torchrun's log directory; the run directory goes there"),
    Option(name="role", section=OUTPUT, metavar="NAME", default="default",
           help="role of the ranks, shown in front of their lines"),
    Option(name="logs-specs", section=OUTPUT, metavar="NAME",
           help="entry point of group torchrun.logs_specs"),
    Option(name="event-log-handler", section=OUTPUT, metavar="NAME", default="null",
           help="name of a registered event log handler"),

    Option(name="max-restarts", section=FAILURE, metavar="K", convert=integer, default=0, toml=INTEGER,
           help="restart all ranks at most K times after a failure"),
    Option(name="restart-rate", section=FAILURE, metavar="N/TIME", ours=True,
           help="and at most N times within any TIME, such as 5/10m (s, m, h, d); more is an error that will stay"),
    Option(name="restart-backoff", section=FAILURE, metavar="SECONDS", convert=number, default=60.0, toml=NUMBER,
           ours=True,
           help="longest pause before a restart; there is none before the first, and it grows only without progress"),
    Option(name="no-progress-limit", section=FAILURE, metavar="N", convert=integer, toml=INTEGER,
           ours=True,
           help="give up after N failures in a row without a step of progress; 0: never "
                "(default: 3, and before the first step as often as --max-restarts says)"),
    Option(name="failure-grace", section=FAILURE, metavar="SECONDS", convert=number, default=1.0, toml=NUMBER,
           ours=True,
           help="time for the other ranks to end after one has failed, before SIGKILL"),
    Option(name="shutdown-timeout", section=FAILURE, metavar="SECONDS", convert=integer, toml=INTEGER,
           help="time for ranks to end after being asked to, before SIGKILL "
                "(default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)"),
    Option(name="leftovers", section=FAILURE, metavar="WHAT", default="leave", ours=True,
           convert=choice("leave", "wait", "end"),
           help="processes that ranks which ended well left behind: leave them running (as torchrun does), wait for "
                "them, or end them; after a failure or a signal they are ended"),
    Option(name="signals-to-handle", section=FAILURE, metavar="NAMES", toml=STRINGS,
           default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
           help="signals that end the job and are forwarded to the ranks"),
    Option(name="monitor-interval", section=FAILURE, metavar="SECONDS", convert=number, default=0.1, toml=NUMBER,
           help="accepted for torchrun; the agent is told by the kernel and does not poll"),

    Option(name="resume", section=CHECKPOINTS, metavar="WHAT", default="auto", ours=True,
           help="auto: from the newest complete checkpoint; never; or the path of one to begin with"),
    Option(name="resume-arg", section=CHECKPOINTS, metavar="TEXT", ours=True,
           help="arguments added when there is a checkpoint, such as '--resume {path}'; or transformers, lightning"),
    Option(name="checkpoint-dir", section=CHECKPOINTS, metavar="DIRS", toml=STRINGS, ours=True,
           help="where checkpoints are looked for: directories or fsspec URLs (default: <job-dir>/checkpoints)"),
    Option(name="checkpoint-pattern", section=CHECKPOINTS, metavar="GLOB", ours=True,
           help="what the program calls its checkpoints, such as 'model_{step}.pt', where no known format fits"),
    Option(name="resume-search-timeout", section=CHECKPOINTS, metavar="SECONDS", convert=number, default=600.0,
           toml=NUMBER, ours=True,
           help="time to read checkpoints for damage before a start; then the newest by structure and manifest is "
                "taken, and read meanwhile (0: at once)"),
    Option(name="preempt-signals", section=CHECKPOINTS, metavar="NAMES", default="SIGTERM,SIGUSR1", toml=STRINGS,
           ours=True,
           help="signals after which the ranks save at the next step and the job ends with 75, to be run again"),
    Option(name="notify-signals", section=CHECKPOINTS, metavar="NAMES", default="SIGUSR2", toml=STRINGS, ours=True,
           help="signals after which the ranks save at the next step and go on"),

    Option(name="on-hang", section=HANGS, metavar="WHAT", default="restart", ours=True,
           convert=choice("restart", "stop", "report"),
           help="what to do when the ranks hang: restart them (within --max-restarts), stop, or only report it"),
    Option(name="hang-timeout", section=HANGS, metavar="SECONDS", convert=number, default=600.0, toml=NUMBER,
           ours=True,
           help="ranks that stand still for so long hang; where it is proven, at once (0: hangs are not looked for)"),
    Option(name="first-step-timeout", section=HANGS, metavar="SECONDS", convert=number, default=3600.0, toml=NUMBER,
           ours=True,
           help="the same before the first step has ended: large models load, the first epoch's data is prepared"),

    Option(name="start-method", section=START, metavar="HOW", default="auto",
           convert=choice("auto", "fork", "spawn", "forkserver"),
           help="fork ranks from a process that has torch loaded, spawn them, or choose (auto); forkserver means fork"),
    Option(name="preload", section=START, metavar="PKGS", default="auto", toml=STRINGS, ours=True,
           help="packages imported once before forking: auto (read from the script), none, or a list"),

    Option(name="no-profile", section=METRICS, default=False, toml=BOOLEAN, ours=True,
           help="start no profiler and no metrics; then a hang is seen only where a rank is stopped by a signal"),
    Option(name="profile-budget", section=METRICS, metavar="PERCENT", convert=number, default=PROFILE_BUDGET,
           toml=NUMBER, ours=True,
           help="share of a step's time that being observed may cost a rank; past it, parts of the profiler are "
                "switched off one by one, and in the end only some steps are observed (0: never)"),
    Option(name="metrics-addr", section=METRICS, metavar="HOST:PORT", default="", ours=True,
           help="where /metrics is served (default: 127.0.0.1, first free port from 9464); "
                "HOST, :PORT and [::1]:PORT work"),
    Option(name="metrics-web-config", section=METRICS, metavar="FILE", default="", ours=True,
           help="protect that address with TLS or a token, in the format of Prometheus' web config; docs/page.md"),
    Option(name="metrics-sd", section=METRICS, metavar="DIR", default="", ours=True,
           help="announce this node's metrics to Prometheus by a file in DIR, while the job runs (file_sd)"),
    Option(name="metrics-push", section=METRICS, metavar="URL", default="", ours=True,
           help="push the last values to this Pushgateway at the end"),
    Option(name="metrics-otlp", section=METRICS, metavar="URL", default="", ours=True,
           help="send metrics to this OpenTelemetry collector, every 15 s (pip install 'gpulaunch[otlp]')"),

    Option(name="standalone", section=RENDEZVOUS, default=False, toml=BOOLEAN,
           help="one node with a free port; other rendezvous options are ignored"),
    Option(name="rdzv-backend", section=RENDEZVOUS, metavar="NAME", default="static",
           help="static; c10d and etcd for one node"),
    Option(name="rdzv-endpoint", section=RENDEZVOUS, metavar="HOST:PORT", default="",
           help="the same as --master-addr and --master-port, for static"),
    Option(name="rdzv-id", section=RENDEZVOUS, metavar="ID", default="none",
           help="id of the run"),
    Option(name="rdzv-conf", section=RENDEZVOUS, metavar="K=V,...", default="",
           help="rendezvous settings; timeout=SECONDS is used"),
    Option(name="local-addr", section=RENDEZVOUS, metavar="HOST",
           help="address of this node"),
)
# fmt: on

BY_DEST: dict[str, Option] = {option.dest: option for option in OPTIONS}
BY_KEY: dict[str, Option] = {name: option for option in OPTIONS for name in option.names}


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    from difflib import get_close_matches  # only on the way to an error

    near = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
