"""What must hold for the files of the house, whoever adds one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICES = ("launcher", "profiler", "exporters")
FOLDERS = (*SLICES, "tests", "deploy", "examples", "benchmarks", "docs", ".ci")


def files() -> Iterator[Path]:
    """Every file of the project that is text: the agreed folders and what lies beside them."""
    for top in [*(ROOT / folder for folder in FOLDERS), *(path for path in ROOT.iterdir() if path.is_file())]:
        for path in top.rglob("*") if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".png", ".bin", ".gz"):
                yield path


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree without network."""
    target = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("gpulaunch-*.whl")
    return built


def test_the_wheel_has_every_module_of_the_three_slices(wheel: Path) -> None:
    """A folder that an unanchored .gitignore pattern or a packaging slip drops would be missed here."""
    in_tree = {
        path.relative_to(ROOT / slice_).as_posix()
        for slice_ in SLICES
        for path in (ROOT / slice_ / "gpulaunch").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }

    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert in_wheel == in_tree
    assert {f"gpulaunch/{slice_}/py.typed" for slice_ in SLICES} <= in_wheel


def test_the_wheel_declares_the_command_and_the_torch_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        entry_points = archive.read(name).decode()

    assert "gpulaunch = gpulaunch.launcher.cli.main:main" in entry_points
    assert "[torch.backends]\ngpulaunch = gpulaunch.profiler.probe.inject:arm" in entry_points


def test_the_installed_wheel_runs_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked (a pure wheel is installed so), it answers without this tree and without any other package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from gpulaunch.launcher.cli.main import main
import gpulaunch.profiler.probe.inject, gpulaunch.exporters.prometheus.catalogue, gpulaunch.mark
assert all(m.__file__.startswith(sys.path[0]) for n, m in sys.modules.items()
           if n.startswith("gpulaunch.") and getattr(m, "__file__", None))
sys.exit(main(["--help"]))
"""

    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert "--nproc" in done.stdout

    by_name = [sys.executable, "-S", "-m", "gpulaunch", "--nprocc", "2"]
    done = subprocess.run(
        by_name, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        2,
        "gpulaunch: error: unknown option --nprocc; did you mean --nproc?\n",
    )


def test_no_init_file_hides_the_other_slices() -> None:
    assert [shown(path) for slice_ in SLICES for path in ROOT.glob(f"{slice_}/gpulaunch/__init__.py")] == []


def test_every_gitignore_pattern_that_could_hide_a_package_is_anchored() -> None:
    """`logs/` without a leading slash silently drops a package of that name from the wheel."""
    packages = {path.name for slice_ in SLICES for path in (ROOT / slice_).rglob("*") if path.is_dir()}
    patterns = {line.strip() for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip()}

    unanchored = {pattern.strip("/") for pattern in patterns if not pattern.startswith("/")}
    assert unanchored & packages <= {"__pycache__"}


def test_no_file_names_a_place_of_one_machine() -> None:
    places = [f"{place}/".encode() for place in (ROOT, ROOT.parent, Path.home()) if len(place.parts) > 1]

    assert [shown(path) for path in files() if any(place in path.read_bytes() for place in places)] == []


def test_the_source_is_ascii() -> None:
    found = [shown(path) for path in files() if path.suffix == ".py" and not path.read_bytes().isascii()]

    assert found == []


def test_torch_is_pinned_in_the_constraints_file_only() -> None:
    pins = [shown(path) for path in files() if b"torch" + b"==" in path.read_bytes()]

    assert pins == ["constraints.txt"]


@pytest.mark.parametrize(
    ("lock", "extra", "builds"),
    [
        ("requirements.lock", "test", ("editables", "hatchling")),
        ("deploy/docker/requirements.lock", "examples", ("hatchling",)),
    ],
    ids=["CI", "image"],
)
def test_a_lock_has_a_hash_for_everything_but_torch(lock: str, extra: str, builds: tuple[str, ...]) -> None:
    """`make lock` writes it; torch is pinned in constraints.txt, because its file is another one on each index."""
    text = (ROOT / lock).read_text()
    entries = re.split(r"\n(?=[a-z])", text)
    locked = {re.split("[=[]", entry)[0] for entry in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra], *builds]

    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry or "==" not in entry] == []
    assert {re.split("[<>=[]", need)[0] for need in wanted} - locked == {"torch"}
    assert "://" not in text


def installs(text: str) -> tuple[list[str], list[str]]:
    """The `pip install` commands of a text: those by hashes, and the others."""
    commands = [line for line in text.splitlines() if re.search(r"\bpip install ", line)]
    return [each for each in commands if "--require-hashes" in each], [
        each for each in commands if "--require-hashes" not in each
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_ci_and_the_image_install_what_is_locked() -> None:
    """By hashes, all but torch and the project itself, which brings no dependency along. What .ci/run has from
    elsewhere is not locked by hashes: Debian's packages are signed, npm's have a version."""
    ci = (ROOT / ".ci/run").read_text()
    words = " ".join(re.findall(r"^make (.+)", ci, re.MULTILINE)).split()
    targets = [word for word in words if "=" not in word]
    assert targets == [".venv/.test", "test", "install-newest", "test-newest"]
    makes = ["make", "-n", "VENV=unmade", "NEWEST=unmade-newest", "unmade/.test", *targets[1:]]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(makes, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    image = (ROOT / "deploy/docker/Dockerfile").read_text()

    assert "pip install" not in ci
    assert re.findall(r"[\w/@]+(?=@[\d.]+\b)", ci) == ["@grafana/schema", "typescript"]
    for text, lock, times in ((made, "requirements.lock", 2), (image, "/src/requirements.lock", 1)):
        by_hashes, others = installs(text)
        assert [each.split()[-1] for each in by_hashes] == [lock] * times
        assert all("--no-deps" in each for each in by_hashes)
        ours = [each for each in others if each.split()[-1] != "torch"]
        assert [each.split()[-1] for each in ours] == (["."] * times if text is made else ["/src"])
        assert all("--no-deps --no-build-isolation" in each for each in ours)
    assert re.search(r"COPY .*deploy/docker/requirements\.lock .*/src/$", image, re.MULTILINE)
