"""A trial writes into a view of the directory that is thrown away: real overlays, as this user and as nobody."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulaunch.launcher.tune import scratch
from needed import program
from users import ROOT, Done, User, user_named

PLACES = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class View:
    """A directory of the user's, and where its upper layers go."""

    user: User
    directory: Path
    upper_parent: str

    def command(self, *argv: str) -> tuple[str, ...]:
        return self.user.python, *scratch.run_in_scratch_argv(argv, str(self.directory), self.upper_parent)[1:]

    def run(self, *argv: str, cwd: str | Path = "", within: tuple[str, ...] = ()) -> Done:
        return self.user.run(*self.command(*argv), cwd=cwd or self.directory, within=within)

    def output(self, *argv: str, cwd: str | Path = "", within: tuple[str, ...] = ()) -> str:
        done = self.run(*argv, cwd=cwd, within=within)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def why_not(self, within: tuple[str, ...] = ()) -> str:
        return self.user.call("why_not(*sys.argv[1:])", self.directory, self.upper_parent, within=within)

    def own(self, path: Path, text: str = "") -> Path:
        """A file of the user's."""
        path.write_text(text)
        os.chown(path, self.user.uid, self.user.gid)
        return path

    def files(self) -> dict[str, str]:
        paths = sorted(self.directory.rglob("*"))
        return {str(path.relative_to(self.directory)): path.read_text() if path.is_file() else "/" for path in paths}


@functools.cache
def trouble_of(user: User) -> str:
    """Why the kernel gives this user no overlay, tried without our program; "" if it does."""
    trouble = ""
    for place in PLACES:
        for options, more in (((), ""), (("--user", "--map-root-user"), ",userxattr")):
            with tempfile.TemporaryDirectory(dir=place) as directory:
                os.chown(directory, user.uid, user.gid)
                layers = f"lowerdir=l,upperdir=u,workdir=w{more}"
                script = f"cd {directory} && mkdir l u w && mount -t overlay overlay -o {layers} l && touch l/a"
                done = user.run("unshare", *options, "--mount", "sh", "-c", script)
            if done.returncode == 0:
                return ""
            trouble = trouble or done.stderr.strip()
    return trouble


@pytest.fixture(params=["self", "nobody"])
def user(request: pytest.FixtureRequest) -> User:
    program("unshare", package="util-linux")
    found = user_named(request.param)
    if trouble := trouble_of(found):
        pytest.skip(f"no overlay here: {trouble}")
    return found


def needs(*argv: str) -> None:
    """Skip where this command, as this user, is not allowed."""
    done = subprocess.run([*argv, "true"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"not allowed here: {done.stderr.strip()}")


def is_mounted(base: Path) -> bool:
    return str(base) in Path("/proc/self/mountinfo").read_text()


@pytest.fixture(params=["plain"])
def view(user: User, request: pytest.FixtureRequest) -> Iterator[View]:
    """A directory with a file, a directory, and a file in that; nothing of it changes in any test."""
    base = Path(tempfile.mkdtemp(prefix="test-of-scratch-", dir="/tmp"))
    base.chmod(0o755)
    try:
        directory = base / request.param
        (directory / "below").mkdir(parents=True)
        view = View(user, directory, user.call("upper_parent(sys.argv[1])", directory))
        held = os.open(f"{view.upper_parent}/lock", os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)  # the process that has made it is gone: the next one would remove it
        view.own(directory / "kept.txt", "as it was\n")
        view.own(directory / "below" / "deep.txt", "deep\n")
        for path in (directory, directory / "below"):
            os.chown(path, user.uid, user.gid)
        before = view.files()
        yield view
        assert view.files() == before
        assert not is_mounted(base)
        scratch.discard(view.upper_parent)
        assert not os.path.lexists(view.upper_parent)
        os.close(held)
    finally:
        shutil.rmtree(base)


CHANGES = """
set -e; d="$1"
echo new > "$d"new.txt; echo more >> "$d"kept.txt; chmod 600 "$d"kept.txt; mkdir "$d"made; mv "$d"made "$d"renamed
rm "$d"below/deep.txt; rmdir "$d"below; mkdir "$d"below; echo x > "$d"below/x; cat "$d"kept.txt; echo * below/*
"""


@pytest.mark.parametrize("view", ["plain", "an odd,name:with\\all"], indirect=True)
@pytest.mark.parametrize("absolute", [False, True])
def test_what_a_trial_changes_is_as_it_was_afterwards(view: View, absolute: bool) -> None:
    assert view.why_not() == ""
    assert os.listdir(view.upper_parent) in ([], ["lock"])

    shown = view.output("sh", "-c", CHANGES, "sh", f"{view.directory}/" if absolute else "")

    assert shown == "as it was\nmore\nbelow kept.txt new.txt renamed below/x\n"  # `view` looks at it from outside


def test_a_directory_that_is_there_can_be_renamed_by_root_only(view: View) -> None:
    try:
        os.setxattr(view.upper_parent, "trusted.overlay.test", b"")
    except OSError:
        pytest.skip("not even root may set the extended attributes of root's overlays here")
    done = view.run(view.user.python, "-c", "import os; os.rename('below', 'other'); print(os.listdir('other'))")

    assert done.stdout == ("['deep.txt']\n" if view.user.uid == 0 else "")
    assert view.user.uid == 0 or os.strerror(errno.EXDEV) in done.stderr


def test_the_current_directory_is_in_the_view(view: View, tmp_path: Path) -> None:
    link = view.directory.parent / "link"
    link.symlink_to(view.directory)
    for cwd, inside in ((view.directory, ""), (view.directory / "below", "/below"), (link, ""), ("/", "")):
        assert view.output("sh", "-c", "echo x > new; pwd -P", cwd=cwd) == f"{view.directory}{inside}\n"

    by_link = View(view.user, link, view.upper_parent)
    assert by_link.why_not() == ""
    assert by_link.output("sh", "-c", f"echo x > {view.directory}/new; cat {link}/new") == "x\n"


def test_exit_code_pid_and_signals_pass_through(view: View) -> None:
    assert view.run("sh", "-c", "exit 7").returncode == 7
    ignored = ("grep", "SigIgn", "/proc/self/status")
    assert view.output(*ignored) == view.user.run(*ignored).stdout

    for trap, code in (("", -signal.SIGTERM), ("trap 'exit 9' TERM; ", 9)):
        argv = [*view.user.before, *view.command("sh", "-c", f"{trap}echo $$; while :; do sleep 0.05; done")]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "launcher")}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env, cwd="/") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{process.pid}\n"
            assert not is_mounted(view.directory)
            process.terminate()
            assert process.wait(30) == code


SEEN = """
import ctypes, os
bound = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(bound), 0, 0, 0)  # PR_GET_PDEATHSIG
open("new.txt", "w").close()
owners = {os.stat(path).st_uid for path in ("kept.txt", "new.txt", "below", ".")}
print(os.getuid(), os.geteuid(), os.getgid(), owners, oct(os.stat(".").st_mode), bound.value)
print([fd for fd in range(3, 90) if os.path.exists(f"/proc/self/fd/{fd}")])
"""


def test_the_program_sees_its_own_uid_and_has_what_it_was_given(view: View) -> None:
    view.directory.chmod(0o750)
    given = ("sh", "-c", 'exec 7</dev/null && exec setpriv --pdeathsig=KILL "$@"', "sh")

    done = view.user.run(*given, *view.command(view.user.python, "-c", SEEN))

    assert done.stderr == ""
    uid, gid = view.user.uid, view.user.gid
    assert done.stdout == f"{uid} {uid} {gid} {{{uid}}} 0o40750 {int(signal.SIGKILL)}\n[7]\n"


READS_ANOTHER = """
import ctypes, os, signal
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
theirs, mine = ctypes.create_string_buffer(b"parent"), ctypes.create_string_buffer(6)
ready, told = os.pipe()
if (pid := os.fork()) == 0:
    theirs.value = b"child!"
    os.write(told, b"y")
    signal.pause()
os.read(ready, 1)
libc = ctypes.CDLL(None, use_errno=True)
parts = [ctypes.byref(Part(ctypes.addressof(each), 6)) for each in (mine, theirs)]
print(libc.process_vm_readv(pid, parts[0], 1, parts[1], 1, 0), mine.raw.decode(), os.readlink(f"/proc/{pid}/cwd"))
os.kill(pid, signal.SIGKILL)
"""


def test_processes_inside_can_read_each_other(view: View) -> None:
    assert view.output(view.user.python, "-c", READS_ANOTHER) == f"6 child! {view.directory}\n"


def test_trials_beside_each_other_do_not_see_each_other(view: View) -> None:
    argv = [*view.user.before, *view.command("sh", "-c", "echo $$ > mine.txt; cat; cat mine.txt")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "launcher")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen(argv, text=True, env=env, cwd="/", **pipes) for _ in range(2)]

    assert [process.communicate("", timeout=30)[0] for process in started] == [f"{each.pid}\n" for each in started]


# --- what is mounted below ----------------------------------------------------------------------------------------

MOUNTED = """
set -e; cd "$1"; shift
add() { mkdir "$1"; mount -t tmpfs none "$1"; }
add 'a mount'; add 'a mount/in'; echo data > 'a mount/in/file'; mount --bind 'a mount/in/file' kept.txt
add hidden; add hidden/inner; mount -t tmpfs none hidden; echo top > hidden/top
code=0; "$@" || code=$?
cat 'a mount/in/new' >&2 || true
umount hidden hidden/inner hidden kept.txt 'a mount/in' 'a mount'; rmdir hidden 'a mount'
exit $code
"""


def test_what_is_mounted_below_stays_visible(view: View) -> None:
    needs("unshare", "--mount")
    mounted = ("unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(view.directory))
    reads = "cat kept.txt */in/file hidden/top; echo written > 'a mount/in/new'; echo x > new; ls hidden"

    if view.user.uid == 0:
        assert view.why_not(mounted) == ""
        done = view.run("sh", "-c", reads, within=mounted)
        assert (done.returncode, done.stdout, done.stderr) == (0, "data\ndata\ntop\ntop\n", "written\n")
    else:  # the kernel does not let a user namespace look below a mount
        reason = f"{view.directory}/a mount is mounted below it, which only root can overlay"
        assert view.why_not(mounted) == f"no overlay: {reason}"
        done = view.run("sh", "-c", reads, within=mounted)
        assert (done.returncode, done.stdout) == (scratch.FAILED, "")
        assert done.stderr.splitlines()[0] == f"gpulaunch: no overlay: {reason}"


SHARED = """
mount -t tmpfs none "$1/below"; mount --bind "$1" "$1"; d="$1"; shift
"$@" || exit
! grep "$d .* - overlay" /proc/self/mountinfo >&2
"""


def test_a_mount_point_that_passes_mounts_on_to_others_gets_none_of_ours(view: View) -> None:
    """As where systemd is: what is mounted in one namespace appears in all that came of it.

    A mount that another one hides is not below the directory, though the kernel lists it so.
    """
    needs("unshare", "--mount")
    mounted = ("unshare", "--mount", "--propagation=shared", "sh", "-c", SHARED, "sh", str(view.directory))

    assert view.why_not(mounted) == ""
    assert view.output("sh", "-c", "echo x > below/new; cat below/deep.txt", cwd="/", within=mounted) == "deep\n"


# --- where it does not work ---------------------------------------------------------------------------------------


def test_directories_that_cannot_be_overlaid(view: View) -> None:
    above, file = view.directory.parent, view.directory / "kept.txt"

    def why_not(*args: object) -> str:
        return view.user.call("why_not(*sys.argv[1:])", *args)

    assert why_not("/") == why_not("/", view.upper_parent) == "no overlay: the root directory cannot be overlaid"
    assert why_not(file) == f"no overlay: {file} is not a directory"
    assert why_not(view.directory, view.directory / "below").endswith("are not apart")
    assert (
        why_not(view.directory, above)
        == f"no overlay: {above}, for the upper layer, and {view.directory} are not apart"
    )
    assert why_not(view.directory, f"{view.upper_parent}/none").endswith(": No such file or directory")


@pytest.mark.parametrize("limit", ["max_mnt_namespaces", "max_user_namespaces"])
def test_a_kernel_that_allows_no_namespaces(view: View, limit: str) -> None:
    """As root of a user namespace one may forbid more of them in it."""
    needs("unshare", "--user", "--map-root-user")
    forbids = f'echo 0 > /proc/sys/user/{limit}; exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin -- "$@"'
    outer = View(User(view.user.uid, view.user.gid, (), view.user.python), view.directory, view.upper_parent)
    within = (*view.user.before, "unshare", "--user", "--map-root-user", "sh", "-c", forbids, "sh")

    assert outer.why_not(within) == "no overlay: unshare: No space left on device"
    done = outer.run("touch", "new", within=within)
    assert (done.returncode, done.stdout) == (scratch.FAILED, "")
    assert done.stderr == "gpulaunch: no overlay: unshare: No space left on device\n"


@pytest.mark.parametrize("mine_below", [False, True])
def test_what_belongs_to_others_but_the_user_may_write(view: View, mine_below: bool) -> None:
    """An overlay in a user namespace cannot copy it (EOVERFLOW): the trial would fail where the job does not."""
    needs("unshare", "--mount")
    theirs = view.directory / "theirs"
    written = theirs / "mine" if mine_below else theirs
    written.mkdir(parents=True)
    try:
        os.chown(written, view.user.uid, view.user.gid if mine_below else 0)
        works = view.user.uid == 0
        reason = f"no overlay: {written} has another owner or group, so only root can overlay it"
        assert view.why_not() == ("" if works else reason)
        assert (view.run("touch", f"{written}/new").returncode == 0) == works
        written.chmod(0o555)
        assert view.why_not() == ""
    finally:
        shutil.rmtree(theirs)


def test_an_attempt_that_takes_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 60\n")
    waits.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(waits))
    started_s = time.monotonic()

    assert scratch.why_not(str(tmp_path)) == "no overlay: it could not be tried within 5 s"
    assert time.monotonic() - started_s < 15


def test_what_cannot_be_run(view: View) -> None:
    done = view.run("./no-such-program")
    assert (done.returncode, done.stdout) == (scratch.FAILED, "")
    assert done.stderr == "gpulaunch: cannot run './no-such-program': No such file or directory\n"
    with pytest.raises(ValueError, match="no program"):
        scratch.run_in_scratch_argv([], "/tmp", "/tmp")


# --- the place of the upper layer ---------------------------------------------------------------------------------


def test_the_upper_parent_is_private_and_apart(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.stat(view.upper_parent)
    assert (status.st_uid, status.st_mode & 0o777) == (view.user.uid, 0o700)

    monkeypatch.setenv("TMPDIR", str(view.directory / "below"))
    elsewhere = view.user.call("upper_parent(sys.argv[1])", view.directory)
    assert not Path(elsewhere).is_relative_to(view.directory)
    view.user.call("discard(sys.argv[1])", elsewhere)

    within = view.user.call("upper_parent()")
    assert Path(within).parent == view.directory / "below"
    view.user.call("discard(sys.argv[1])", within)


def test_discard_removes_everything_and_follows_no_link(user: User) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        outside = Path(base, "outside")
        outside.mkdir()
        (outside / "file").write_text("kept")
        top = Path(base, "top")
        (top / "upper" / "closed").mkdir(parents=True)
        (top / "upper" / "closed" / "file").touch()
        (top / "work" / "work").mkdir(parents=True)
        (top / "upper" / "to_directory").symlink_to(outside)
        (top / "upper" / "to_file").symlink_to(outside / "file")
        for path in (Path(base), *Path(base).rglob("*")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)
        outside.chmod(0o500)
        for closed in (top / "upper" / "closed", top / "work" / "work"):
            closed.chmod(0)
        link = Path(base, "link")
        link.symlink_to(outside)

        for _ in range(2):  # the second time there is nothing
            user.call("discard(sys.argv[1])", top)
        assert sorted(os.listdir(base)) == ["link", "outside"]
        with pytest.raises(OSError, match="symbolic link"):
            scratch.discard(str(link))
        assert (outside / "file").read_text() == "kept"
        assert outside.stat().st_mode & 0o777 == 0o500


def test_what_a_killed_process_has_left_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = "import sys; from gpulaunch.launcher.tune.scratch import upper_parent; print(upper_parent(), flush=True)"
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert os.path.dirname(left) == str(tmp_path)
    mine = scratch.upper_parent()
    again = scratch.upper_parent()

    assert not os.path.exists(left)
    assert os.path.exists(mine)
    for each in (mine, again):
        scratch.discard(each)
