"""A throw-away view of a directory: an overlay whose upper layer is removed after the trial.

The command of `run_in_scratch_argv` gets a mount namespace of its own (for a normal user in a user namespace that maps
only the user's own uid and gid), mounts the overlay over the directory, and replaces itself by the program to run. The
caller's mounts do not change.

Not thrown away: what is written outside of the directory, also through a symbolic link in it; on other file systems
that are mounted below it; and through descriptors that were opened before. A normal user cannot rename directories that
are there already (EXDEV, as between file systems), and sees other groups than the main one as 65534.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

# linux/sched.h, linux/mount.h
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19

FAILED = 125
"""Exit code of the command if there is no overlay, or if the program cannot be executed."""
_ENTRY = "from gpulaunch.launcher.tune.scratch import main; main()"
_WITHIN_S, _LOOK_S, _SMALL_BYTES = 5.0, 1.0, 1 << 20
_LOCK = "lock"
_held: list[int] = []
"""Descriptors of the locks of directories in use; the kernel releases them with this process."""
_PREFIX = "gpulaunch-tune-"  # not gpulaunch-UID-, which an agent removes from /dev/shm as segments without a run


def why_not(directory: str, upper_parent: str = "") -> str:
    """Try it in a child process, for a few seconds at most.

    Args:
        directory: what a trial is to have a throw-away view of.
        upper_parent: where the upper layer would be; "": try the places of the function `upper_parent`.

    Returns:
        "" if it works, else the reason in one line.
    """
    directory = os.path.realpath(directory)
    if upper_parent:
        return _try(directory, upper_parent, _WITHIN_S)
    made, reason = _first_place(directory)
    if made:
        discard(made)
    return reason


def upper_parent(directory: str = "") -> str:
    """Make a private directory for upper layers: in the first place where that works, else in the first possible one.

    Args:
        directory: what is to be overlaid; the place is not below it. "": not known yet.

    Returns:
        Its path. The caller removes it with `discard`.

    Raises:
        OSError: there is no such place.
    """
    _remove_stale()
    made, reason = _first_place(os.path.realpath(directory) if directory else "")
    if not made:
        raise OSError(errno.ENOENT, reason)
    lock = os.open(os.path.join(made, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    return made


def run_in_scratch_argv(argv: Sequence[str], directory: str, upper_parent: str) -> list[str]:
    """The command that runs `argv` with a throw-away view of `directory`; pid and descriptors are passed on.

    The current directory stays the same if it is `directory` or below it, and becomes `directory` otherwise. If there
    is no overlay, `argv` is not run: the exit code is FAILED, and one line on stderr gives the reason.

    Args:
        argv: the program and its arguments.
        directory: writes below it go to a new directory in `upper_parent`.
        upper_parent: made by the function of this name; several commands may use the same.
    """
    if not argv:
        raise ValueError("no program to run")
    return [*_command(directory, upper_parent), *argv]


def discard(upper_parent: str) -> None:
    """Remove a directory with upper layers; links are removed, not followed. Nothing happens if it is gone.

    The commands that use it must have ended. Raises OSError if something cannot be removed.
    """
    if not os.path.lexists(upper_parent):
        return
    # Overlayfs leaves a directory with mode 000; and a program may have taken permissions from its own.
    for _, names, _, parent in os.fwalk(upper_parent, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):  # a link to a directory
                fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                with contextlib.suppress(PermissionError):
                    os.chmod(f"/proc/self/fd/{fd}", 0o700)
                os.close(fd)
    shutil.rmtree(upper_parent)


def _remove_stale() -> None:
    """Remove what processes have left that were killed: directories of this user whose lock nobody holds."""
    for place in _places():
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if not entry.name.startswith(_PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                with contextlib.suppress(OSError):  # it is being made, or removed, or in use
                    lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        discard(entry.path)
                    finally:
                        os.close(lock)


def _places() -> list[str]:
    """Where directories for upper layers may be."""
    named = (os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (a private one in it)
    return list(dict.fromkeys(map(os.path.realpath, named)))


def _first_place(directory: str) -> tuple[str, str]:
    """A new directory where it works, and ""; or the first that could be made ("": none), and why it does not work."""
    until_s = time.monotonic() + _WITHIN_S
    kept = why = ""
    for place in _places():
        try:
            if directory:
                _refuse(directory, os.path.join(place, _PREFIX))
            made = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        except OSError as err:
            why = why or line_of(err)
            continue
        reason = _try(directory, made, until_s - time.monotonic())
        if not reason:
            discard(kept)
            return made, ""
        if kept:
            discard(made)
        else:
            kept, why = made, reason
    return kept, why


def _command(directory: str, upper_parent: str) -> list[str]:
    """The command without a program, which tries the overlay. -B: it may import from below the directory."""
    return [sys.executable, "-P", "-B", "-c", _ENTRY, os.path.realpath(directory), os.path.realpath(upper_parent)]


def _try(directory: str, upper_parent: str, within_s: float) -> str:
    """Why it does not work, or "". `directory` "": try with an empty one."""
    inner = ""
    try:
        if directory:
            _refuse(directory, os.path.realpath(upper_parent))
        inner = tempfile.mkdtemp(prefix="try-", dir=upper_parent)
        lower, upper = os.path.join(inner, "lower"), os.path.join(inner, "upper")
        os.mkdir(lower)
        os.mkdir(upper)
        argv, null = _command(directory or lower, upper), subprocess.DEVNULL
        done = subprocess.run(
            argv,
            stdin=null,
            stdout=null,
            stderr=subprocess.PIPE,
            timeout=max(within_s, 0.1),
            start_new_session=True,  # Ctrl-C is the caller's to handle
        )
    except subprocess.TimeoutExpired:
        return f"no overlay: it could not be tried within {_WITHIN_S:.0f} s"
    except OSError as err:
        return line_of(err)
    finally:
        with contextlib.suppress(OSError):
            discard(inner)
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("gpulaunch: ")
    return "" if done.returncode == 0 else said or f"no overlay: exit code {done.returncode}"


def line_of(err: OSError, what: str = "no overlay") -> str:
    """What failed, and why."""
    where = "" if err.filename is None else f"{os.fsdecode(err.filename)}: "
    return " ".join(f"{what}: {where}{err.strerror or err}".splitlines())


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def _refuse(directory: str, upper_parent: str) -> None:
    """Raise OSError if these real paths make no sense together."""
    if not os.path.isdir(directory):
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is not a directory")
    if directory == "/":
        raise OSError(errno.EINVAL, "the root directory cannot be overlaid")
    if _is_in(upper_parent, directory) or _is_in(directory, upper_parent):
        raise OSError(errno.EINVAL, f"{upper_parent}, for the upper layer, and {directory} are not apart")


# --- the command's own process ------------------------------------------------------------------------------------


def main() -> None:
    """The command, with arguments DIRECTORY UPPER_PARENT [PROGRAM ...]; without a program it tries the overlay."""
    directory, upper_parent, *argv = sys.argv[1:]
    what = "no overlay"
    try:
        upper = enter(directory, upper_parent, trying=not argv)
        if not argv:
            _write(directory, upper)
            return
        what = f"cannot run {argv[0]!r}"
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; a program expects the defaults
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(argv[0], argv)  # noqa: S606 (exec without a shell is the point)
    except OSError as err:
        sys.stderr.write(f"gpulaunch: {line_of(err, what)}\n")
        sys.exit(FAILED)


def enter(directory: str, upper_parent: str, *, trying: bool = False) -> str:
    """Mount the overlay in a new mount namespace and return the path of its upper layer. Raises OSError."""
    _refuse(directory, upper_parent)
    cwd = os.getcwd()
    parts = tempfile.mkdtemp(prefix="trial-", dir=upper_parent)
    os.chdir(parts)  # relative paths as mount options: a comma or a colon in a path would separate them
    os.mkdir("upper")
    os.mkdir("work")
    # The overlay's root has the owner and the mode of the upper directory.
    lower_stat = os.stat(directory)
    mode = stat.S_IMODE(lower_stat.st_mode)
    as_user = False
    try:
        _unshare(_CLONE_NEWNS)
    except PermissionError:
        as_user = True
        mode = mode & 0o077 | (0o700 if os.access(directory, os.W_OK) else 0o500)
        if trying and (path := _not_copied(directory)):
            raise OSError(errno.EOVERFLOW, f"{path} has another owner or group, so only root can overlay it") from None
        _unshare_as_user()
    else:
        os.chown("upper", lower_stat.st_uid, lower_stat.st_gid)
    os.chmod("upper", mode)
    # Not MS_PRIVATE: what an automounter mounts outside on demand must appear here, too.
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)
    below = _open_submounts(directory)
    lower = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.statvfs(directory).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    layers = f"lowerdir=/proc/self/fd/{lower},upperdir=upper,workdir=work"
    try:
        _mount("overlay", directory, "overlay", flags, f"{layers},{_xattr_option()}")
    except OSError as err:
        if as_user and below and err.errno == errno.EINVAL:  # a user namespace must not show what a mount covers
            raise OSError(err.errno, f"{below[0][1]} is mounted below it, which only root can overlay") from None
        raise
    for fd, path in below:
        _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
    os.chdir(cwd if _is_in(cwd, directory) else directory)
    return os.path.join(parts, "upper")


def _unshare(flags: int) -> None:
    _checked("unshare", ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(flags)))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2): `kind` None: no new file system. Raises OSError."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    _checked(f"mount {kind or ''} at {target}".replace("  ", " "), result)


def _checked(step: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def _unshare_as_user() -> None:
    """Get new user and mount namespaces. The user's uid and gid stay the same in them; exec drops the capabilities."""
    uid, gid = os.geteuid(), os.getegid()
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
    for name, text in maps.items():
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        except OSError as err:
            raise OSError(err.errno, f"{name}: {err.strerror}") from None
        finally:
            os.close(fd)


def drop_capabilities() -> None:
    """Give up what a normal user's process has in its user namespace until it executes a program, capset(2)."""
    if os.geteuid() == 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked("capset", ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()))


def _xattr_option() -> str:
    """The mount option for the extended attributes that can be set in the upper layer: only root's can redirect."""
    for name, option in (("trusted.overlay.test", "redirect_dir=on"), ("user.overlay.test", "userxattr")):
        with contextlib.suppress(OSError):
            os.setxattr("upper", name, b"y")
            os.removexattr("upper", name)
            return option
    raise OSError(errno.ENOTSUP, f"{os.getcwd()}: no extended attributes")


def _open_submounts(directory: str) -> list[tuple[int, str]]:
    """A descriptor (O_PATH) and the path of each mount below `directory` that is visible and in no other of these."""
    with open("/proc/self/mountinfo", "rb") as file:  # proc_pid_mountinfo(5): id parent major:minor root path ...
        fields = [line.split() for line in file.read().splitlines()]
    found: list[tuple[int, str]] = []
    for escaped, mount_id in sorted((each[4], each[0]) for each in fields):
        path = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), escaped))
        if path == directory or not _is_in(path, directory) or any(_is_in(path, outer) for _, outer in found):
            continue
        with contextlib.suppress(OSError):  # hidden by another mount, or not accessible here either
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
                visible = re.search(rb"^mnt_id:\s*(\d+)", file.read(), re.MULTILINE)
            if visible is not None and visible[1] == mount_id:
                found.append((fd, path))
            else:
                os.close(fd)
    return found


def _not_copied(directory: str) -> str:
    """A path that the user may write but an overlay in a user namespace cannot copy (EOVERFLOW); "" if none is found.

    Such is what belongs to another user or group, or lies below a directory that does. It looks for a second at most.
    """
    own, until_s = (os.geteuid(), os.getegid()), time.monotonic() + _LOOK_S
    device = os.stat(directory).st_dev
    found = [(directory, False)]
    for parent, in_foreign in found:  # it grows meanwhile: breadth first
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if status.st_dev != device:  # mounted here: not a part of the overlay
                    continue
                foreign = in_foreign or (status.st_uid, status.st_gid) != own
                if foreign and not entry.is_symlink() and os.access(entry.path, os.W_OK):
                    return entry.path
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.path, foreign))
        if time.monotonic() > until_s:
            break
    return ""


def _write(directory: str, upper: str) -> None:
    """Raise OSError if a file cannot be made or copied in the overlay."""
    with tempfile.NamedTemporaryFile(prefix=".gpulaunch-", dir=directory) as file:
        os.stat(os.path.join(upper, os.path.basename(file.name)))
    with os.scandir(directory) as entries:
        for entry in entries:
            small = entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _SMALL_BYTES
            if small and os.access(entry.path, os.W_OK):
                os.close(os.open(entry.path, os.O_WRONLY | os.O_CLOEXEC))  # copies it to the upper layer
                return
