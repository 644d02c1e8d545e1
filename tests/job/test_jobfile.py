"""The job file: every key typed by the option table, every mistake one line that names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.job import jobfile
from gpulaunch.launcher.job.load import Settings
from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import Option, UsageError


def refused(text: str | bytes) -> str:
    Path("job.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UsageError) as caught:
        jobfile.read("job.toml")
    return str(caught.value)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('nproc = 2\nnprocc = "3"', "job.toml: unknown key 'nprocc'; did you mean nproc?"),
        ("master_prt = 3", "job.toml: unknown key 'master_prt'; did you mean master-port?"),
        ("[environ]\nA = 'b'", "job.toml: unknown key 'environ'; did you mean env?"),
        ("nproc = true", "job.toml: key 'nproc' must be a string or an integer, got the boolean True"),
        ("nproc = 1.5", "job.toml: key 'nproc' must be a string or an integer, got the number 1.5"),
        ('max-restarts = "3"', "job.toml: key 'max-restarts' must be an integer, got the string '3'"),
        ("monitor-interval = []", "job.toml: key 'monitor-interval' must be a number, got the list []"),
        ("standalone = 1", "job.toml: key 'standalone' must be true or false, got the integer 1"),
        ("name = 2026-01-01", "job.toml: key 'name' must be a string, got a date or time: datetime.date(2026, 1, 1)"),
        ("gpus = [0, true]", "job.toml: key 'gpus' must be a list of strings or integers, got the list [0, True]"),
        ("script = 3", "job.toml: key 'script' must be a string, got the integer 3"),
        ("args = '--lr 3'", "job.toml: key 'args' must be a list of strings, got the string '--lr 3'"),
        ("args = [3]", "job.toml: key 'args' must be a list of strings, got the list [3]"),
        ("env = 3", "job.toml: key 'env' must be a table of strings, got the integer 3"),
        ("[env]\nA = 3", "job.toml: key 'env.A' must be a string, got the integer 3"),
        ("[env.A]\nB = ''", "job.toml: key 'env.A' must be a string, got a table"),
        ("[env]\n'A=B' = ''", "job.toml: 'A=B' cannot be an environment variable"),
        ("[env]\nRANK = '0'", "job.toml: [env] cannot set RANK: the launcher sets it for each rank"),
        ("config = 'x'", "job.toml: a job file cannot include another one (key 'config')"),
        (
            "nproc = 1\nnproc_per_node = 1",
            "job.toml: key 'nproc_per_node' sets --nproc-per-node a second time under another name",
        ),
    ],
)
def test_a_wrong_key_or_type(text: str, line: str) -> None:
    assert refused(text) == line


@pytest.mark.usefixtures("script")
def test_text_that_is_no_toml_is_told_with_its_line() -> None:
    assert "line 2" in refused("nproc = 1\nnproc 2\n")
    assert "line 3" in refused('nproc = 1\n\nname = "')
    assert refused(b"a = 1\nb = '\xff'") == "job.toml: not valid TOML: not UTF-8 (at line 2)"
    assert "\n" not in refused("nproc = 1\nnproc 2\n")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        jobfile.read(str(tmp_path / "no.toml"))
    with pytest.raises(UsageError, match="Is a directory"):
        jobfile.read(str(tmp_path))


def test_values_are_written_as_the_command_line_would(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'nproc = "auto"\nnnodes = 2\ngpus = [0, "GPU-1"]\nmonitor_interval = 1\nstandalone = false\n'
        'duplicate-stdout-filters = ["a,b", "c"]\nsignals-to-handle = ["SIGTERM", "SIGINT"]\n[env]\nA = "b"\n'
    )
    file = jobfile.read(str(path))

    assert file.values == {
        "nproc_per_node": "auto",
        "nnodes": "2",
        "gpus": "0,GPU-1",
        "monitor_interval": "1",
        "standalone": False,
        "duplicate_stdout_filters": "a,,b,c",
        "signals_to_handle": "SIGTERM,SIGINT",
    }
    assert file.env == {"A": "b"}


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.name != "config"], ids=lambda each: each.name
)
def test_every_option_but_the_file_itself_is_a_key(option: Option) -> None:
    """A value of the first type that the option takes arrives under each of its names, with the file as its origin."""
    words = {"numa-binding": '"node"', "start-method": '"fork"', "on-hang": '"stop"', "leftovers": '"end"'}
    by_type = {"string": '"1"', "integer": "1", "number": "1.5", "boolean": "true"}
    for key in option.names:
        Path("job.toml").write_text(f"{key} = {words.get(option.name, by_type[option.toml[0]])}\n")
        settings = Settings({"training_script": "train.py"}, {"GPULAUNCH_CONFIG": "job.toml"})

        assert settings.origins[option.name] == "job.toml"
        assert settings[option.name] != option.default or option.name == "nproc-per-node"


@given(st.binary(max_size=60) | st.text("nprocgpus=[]\"'.#-_ \n01{}", max_size=60).map(str.encode))
def test_no_file_at_all_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        complaint = None
        jobfile.read(str(path))
    except UsageError as err:
        complaint = str(err)

    assert complaint is None or (complaint.startswith(str(path)) and "\n" not in complaint)
