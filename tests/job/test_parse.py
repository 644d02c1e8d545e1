"""The command line: whatever torchrun's own parser accepts, ours reads the same way."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpulaunch.launcher.job.load import Settings
from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.parse import build_parser, help_text, parse
from gpulaunch.launcher.job.verbs import VERBS

IS_NEW_TORCH = tuple(map(int, metadata.version("torch").split(".")[:2])) >= (2, 14)
TORCHRUNS = [
    option for option in OPTIONS if not option.ours and (IS_NEW_TORCH or option.name != "log-line-prefix-template")
]
# torchrun reads no variable for these two; its start method only matters for functions, so our default is another one.
NO_VARIABLE = {"logs_specs", "numa_binding"}

SERVER = """
import contextlib, io, json, os, sys
from torch.distributed.run import get_args_parser
for line in sys.stdin:
    argv, environ = json.loads(line)
    if argv is None:
        print(json.dumps([s for action in get_args_parser()._actions for s in action.option_strings]), flush=True)
        continue
    os.environ.update(environ)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            answer = vars(get_args_parser().parse_args(argv))
            answer.pop("print_completion", None)  # torch 2.14; None, for an option that prints and exits
        except SystemExit as end:
            answer = None if end.code else {"help": True}
        except ValueError:  # PET_STANDALONE=yes and the like end torchrun with a traceback
            answer = None
    for name in environ:
        del os.environ[name]
    print(json.dumps(answer), flush=True)
"""


class Torchrun:
    """torchrun's own parser in a process of its own, so that this one stays free of torch."""

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, argv: list[str], environ: dict[str, str] | None = None) -> dict[str, Any] | None:
        """The parsed line with torchrun's defaults, {"help": True}, or None if it is refused."""
        return self._ask([argv, environ or {}])

    def option_strings(self) -> list[str]:
        return self._ask([None, {}])

    def _ask(self, question: Any) -> Any:
        self.server.stdin.write(json.dumps(question).encode() + b"\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Torchrun]:
    torchrun = Torchrun()
    yield torchrun
    torchrun.server.communicate()


def as_torchrun(given_: dict[str, Any]) -> dict[str, Any]:
    """Our parsed line with torchrun's defaults filled in, in torchrun's types."""
    values = {option.dest: option.default for option in TORCHRUNS} | {"start_method": "spawn"} | given_
    values.setdefault("training_script_args", [])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def ours(argv: list[str]) -> dict[str, Any] | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parsed = parse(argv)
    except UsageError:
        return None
    except SystemExit:
        return {"help": True}
    return as_torchrun(parsed) if "training_script" in parsed else None


WORD = st.text("abz019-_=,:.${} ", max_size=8)
VALUES = {
    "nnodes": st.sampled_from(["1", "1:1", "2", "2:20:30", ""]),
    "redirects": st.sampled_from(["0", "3", "0:1,1:2", "10:3"]),
    "numa_binding": st.sampled_from(["node", "socket", "exclusive", "core-complex"]),
    "start_method": st.sampled_from(["fork", "spawn", "forkserver"]),
    "monitor_interval": st.sampled_from(["0.1", "5", "-1", "1e3"]),
}


def value_of(option: Any) -> st.SearchStrategy[str]:
    if option.dest in VALUES:
        return VALUES[option.dest]
    if option.dest in ("node_rank", "master_port", "max_restarts", "shutdown_timeout"):
        return st.integers(-3, 70000).map(str)
    return WORD


@st.composite
def spelt_option(draw: st.DrawFn) -> list[str]:
    option = draw(st.sampled_from(TORCHRUNS))
    spelling = draw(st.sampled_from([option.name, option.dest]))
    cut = draw(st.integers(0, 6))  # an abbreviation, clear or not
    long = "--" + (spelling[: max(3, len(spelling) - cut)])
    if long in ("--log-", "--log_"):  # short for --log-dir in torch 2.13, for two options in 2.14
        long = f"--{spelling}"
    if option.is_flag:
        return [draw(st.sampled_from([long] + ([f"-{option.short}"] if option.short else [])))]
    value = draw(value_of(option))
    forms = [[long, value], [f"{long}={value}"]]
    if option.short:
        forms += [[f"-{option.short}", value], [f"-{option.short}{value}"], [f"-m{option.short}{value}"]]
    return draw(st.sampled_from(forms))


COMMAND_LINES = st.tuples(
    st.lists(spelt_option(), max_size=5),
    st.sampled_from([["train.py"], ["--", "train.py"], ["pkg.mod"], [""], ["a b"], ["-1"], []]),
    st.lists(
        st.one_of(WORD, st.sampled_from(["--nproc-per-node", "--lr", "-m", "--", "--help", "--gpus=3"])), max_size=4
    ),
).map(lambda parts: [word for option in parts[0] for word in option] + parts[1] + parts[2])


@pytest.mark.torch
@given(COMMAND_LINES)
@example(["--redirect=3", "-t", "0:1,1:2", "train.py", "--nproc", "4", "--", "-x"])
@example(["--no-p", "script.sh"])
@example(["--nproc_per", "2", "train.py"])
@example(["-mr3", "pkg"])
@example(["--log-", "logs", "train.py"])
@example(["train.py", "--", "--lr", "1"])
def test_whatever_torchrun_accepts_we_read_the_same_way(torchrun: Torchrun, argv: list[str]) -> None:
    theirs = torchrun(argv)
    assume(theirs is not None)

    assert ours(argv) == theirs


@pytest.mark.torch
@given(st.lists(spelt_option(), max_size=4))
def test_what_torchrun_refuses_we_refuse(torchrun: Torchrun, options: list[list[str]]) -> None:
    """The other half of agreement, but for abbreviations: more of them are clear to us."""
    argv = [word for option in options for word in option] + ["train.py"]
    theirs, mine = torchrun(argv), ours(argv)
    exact = {s for option in OPTIONS for s in option.option_strings}
    clear = all(word.partition("=")[0] in exact for word in argv if word.startswith("--"))

    if clear:
        assert (mine is None) == (theirs is None)


@st.composite
def environments(draw: st.DrawFn) -> dict[str, str]:
    environ: dict[str, str] = {}
    for option in draw(st.lists(st.sampled_from(TORCHRUNS), max_size=5)):
        if option.dest in NO_VARIABLE:
            continue
        value = draw(st.sampled_from(["0", "1", "2"]) if option.is_flag else value_of(option))
        environ[f"PET_{option.dest.upper()}"] = value
    return environ


@pytest.mark.torch
@given(environments(), st.lists(spelt_option(), max_size=3))
@example({"PET_STANDALONE": "0"}, [["--standalone"]])
@example({"PET_NPROC_PER_NODE": "4", "PET_ROLE": ""}, [])
def test_pet_variables_mean_what_they_mean_to_torchrun(
    torchrun: Torchrun, environ: dict[str, str], options: list[list[str]]
) -> None:
    argv = [word for option in options for word in option] + ["train.py"]
    theirs = torchrun(argv, environ)
    assume(theirs is not None and "help" not in theirs)
    settings = Settings(parse(argv), environ)
    mine = {option.dest: settings[option.name] for option in TORCHRUNS}
    if settings.origins["start-method"] == "default":
        mine["start_method"] = "spawn"

    assert as_torchrun(mine | {"training_script": "train.py"}) == theirs


@pytest.mark.torch
def test_our_table_has_every_option_of_torchrun_and_only_more(torchrun: Torchrun) -> None:
    theirs = set(torchrun.option_strings()) - {"-h", "--help", "--print-completion", "--print_completion"}
    mine = {s for option in TORCHRUNS for s in option.option_strings}

    assert theirs == mine - {"--nproc"}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--nprocc", "2", "train.py"], "unknown option --nprocc; did you mean --nproc?"),
        (["--nprocc"], "unknown option --nprocc; did you mean --nproc?"),
        (["--master_adr=x", "train.py"], "unknown option --master_adr; did you mean --master_addr?"),
        (["--hepl"], "unknown option --hepl; did you mean --help?"),
        (["--xyzzy", "train.py"], "unknown option --xyzzy"),
        (["-q", "train.py"], "unknown option -q"),
        (["--max-restarts", "few", "train.py"], "--max-restarts: expected a whole number, got 'few'"),
        (["--nnodes"], "--nnodes: expected one argument"),
        (["--standalone=yes", "x"], "--standalone: ignored explicit argument 'yes'"),
        (
            ["--numa-binding", "nodes", "x"],
            "--numa-binding: 'nodes' is not one of node, socket, exclusive, core-complex; did you mean node?",
        ),
    ],
)
def test_a_mistake_is_one_line_with_what_was_probably_meant(argv: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)

    assert str(caught.value) == line


def test_an_ambiguous_abbreviation_names_its_candidates() -> None:
    with pytest.raises(UsageError, match=r"ambiguous option: --st could match .*--standalone"):
        parse(["--st", "train.py"])
    with pytest.raises(UsageError, match=r"ambiguous option: --st could match .*--standalone"):
        parse(["--st=a b", "train.py"])


def beginnings() -> list[str]:
    """Every way in which a word of a program's own may look like the beginning of an option of ours."""
    spelt = {name for option in OPTIONS for name in option.option_strings}
    return sorted({name[:length] for name in spelt for length in range(2, len(name) + 1)} - {"--"})


@pytest.mark.parametrize("value", [[], ["3"], ["=3"]], ids=["alone", "with a value", "with ="])
def test_no_word_behind_the_program_is_ours_however_much_it_looks_like_it(value: list[str]) -> None:
    """`train.py --checkpoint last.pt`: argparse looks at all words first, and gave up at what it could be short for."""
    for word in beginnings():
        own = [word + value[0]] if value and value[0].startswith("=") else [word, *value]
        read = parse(["--nproc", "2", "train.py", *own])
        assert (read["training_script"], read["training_script_args"]) == ("train.py", own)


def test_abbreviations_of_our_own_options_work_and_never_take_torchruns() -> None:
    assert parse(["--dry", "--metrics-a", ":1", "x"])["dry_run"] is True
    assert parse(["--no-p", "x"])["no_python"] is True
    assert parse(["--no-prof", "x"])["no_profile"] is True


def test_defaults_can_be_put_into_the_parser_for_argparse_users() -> None:
    parser = build_parser()
    parser.set_defaults(**{option.dest: option.default for option in OPTIONS})
    parsed = parser.parse_args(["--nproc", "3", "train.py", "-x"])

    assert (parsed.nproc_per_node, parsed.nnodes, parsed.training_script_args) == ("3", "1:1", ["-x"])


def test_help_names_every_option_and_verb_and_fits_a_terminal() -> None:
    text = help_text()

    assert [option.name for option in OPTIONS if f"--{option.name}" not in text] == []
    assert [verb for verb in VERBS if f"`{verb}`" not in text or f"       gpulaunch {verb} " not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 118


def test_help_does_not_load_what_only_a_job_needs() -> None:
    code = (
        "import sys; from gpulaunch.launcher.cli.main import main; main(['--help']);"
        "print([m for m in ('torch', 'pynvml', 'psutil', 'tomllib', 'importlib.metadata', 'asyncio', 'logging',"
        " 'subprocess', 'typing', 'gpulaunch.launcher.job.load', 'gpulaunch.launcher.job.host_info')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    loaded = done.stdout.splitlines()[-1]
    assert loaded in ("[]", "['typing']")
