"""Our own checkpoints, by their manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import manifest, memory
from gpulaunch.launcher.checkpoint.damaged import OutOfTimeError
from gpulaunch.launcher.checkpoint.find import examine, find
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, Damaged, Manifest, ManifestFile


def save(root: Path, step: int, *, saved_s: float = 1000.0, generation: int = 7) -> Path:
    path = root / f"step-{step:012d}"
    (path / "sub").mkdir(parents=True)
    for name in ("__0_0.distcp", "sub/rng"):
        (path / name).write_bytes(f"{name} of step {step}".encode() * 100)
    files = tuple(
        ManifestFile(name=name, size_bytes=(path / name).stat().st_size, sha256=manifest.digest(str(path / name)))
        for name in ("__0_0.distcp", "sub/rng")
    )
    said = Manifest(step=step, attempt=3, generation=generation, world_size=4, saved_s=saved_s, files=files)
    manifest.write(str(path), said)
    return path


def test_what_was_written_is_read_and_verified(tmp_path: Path) -> None:
    path = save(tmp_path, 120)

    said = manifest.read(str(path))
    manifest.verify(str(path))

    assert (said.step, said.attempt, said.generation, said.world_size, said.saved_s) == (120, 3, 7, 4, 1000.0)
    assert said.files[0].sha256 == hashlib.sha256((path / "__0_0.distcp").read_bytes()).hexdigest()
    (found,) = find([str(tmp_path)]).found
    assert (found.path, found.format, found.step, found.saved_s) == (str(path), "gpulaunch", 120, 1000.0)
    assert found.size_bytes == sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def harms(path: Path) -> dict[str, tuple[str, bytes | None]]:
    """why: the file, and its content after the harm; None removes it."""
    shard = (path / "__0_0.distcp").read_bytes()
    return {
        "__0_0.distcp is missing": ("__0_0.distcp", None),
        f"__0_0.distcp has {len(shard) - 1} of {len(shard)} bytes": ("__0_0.distcp", shard[:-1]),
        "__0_0.distcp has changed since it was written": ("__0_0.distcp", bytes([shard[0] ^ 1]) + shard[1:]),
        f"{MANIFEST} is missing": (MANIFEST, None),
        f"{MANIFEST} is not JSON": (MANIFEST, b'{"version": 1'),
    }


@pytest.mark.parametrize("at", range(5))
def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, at: int) -> None:
    older, path = save(tmp_path, 100), save(tmp_path, 120)
    why, (name, content) = list(harms(path).items())[at]
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)

    search = find([str(tmp_path)])

    assert [one.path for one in search.found] == [str(older)]
    assert [(one.path, one.format) for one in search.skipped] == [(str(path), "gpulaunch")]
    assert search.skipped[0].why.startswith(why)
    for verify in (manifest.verify, examine):
        with pytest.raises(Damaged, match=why.replace(".", r"\.")):
            verify(str(path))


def test_one_that_is_being_saved_is_not_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 120).rename(tmp_path / ".saving-000000000120-g7")
    (tmp_path / ".generation").write_text("7")
    (tmp_path / ".lock").touch()

    search = find([str(tmp_path)])

    assert (search.found, search.skipped) == ((), ())


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in ("../secret", "/etc/passwd", "a/../../b", "a\0b"):
        document = json.loads((path / MANIFEST).read_text())
        document["files"][0]["name"] = name
        with pytest.raises(Damaged, match="is invalid"):
            manifest.parse(json.dumps(document).encode())


def test_a_version_from_the_future_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    document = json.loads((path / MANIFEST).read_text())

    with pytest.raises(Damaged, match="has version 2, and this gpulaunch reads 1"):
        manifest.parse(json.dumps({**document, "version": 2}).encode())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["version", "step", "generation", "saved_s", "files", "name", "size_bytes", "sha256"]), anything)
def test_no_document_raises_anything_but_damaged(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "step-000000000001"
    if not path.exists():
        save(tmp_path, 1)
    document = json.loads((path / MANIFEST).read_text())
    (document if field in document else document["files"][0])[field] = value

    for data in (json.dumps(document).encode(), json.dumps(value).encode()):
        try:
            manifest.parse(data)
        except Damaged:
            continue


def test_a_later_generation_is_newer_whatever_its_step(tmp_path: Path) -> None:
    """A run that began from an older checkpoint again: what lies beyond it is an abandoned branch."""
    for step, generation in ((100, 1), (200, 1), (120, 2)):
        save(tmp_path, step, generation=generation)

    assert [one.step for one in find([str(tmp_path)], limit=9).found] == [120, 200, 100]


def test_a_manifest_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    save(tmp_path, 200)
    (save(tmp_path, 100) / MANIFEST).write_text("{")

    search = find([str(tmp_path)])

    assert [one.step for one in search.found] == [200]
    assert [Path(one.path).name for one in search.skipped] == ["step-000000000100"]


# -- when there is no time to read it all


@pytest.mark.parametrize("content_s", [0.0, 1e-9])
def test_without_time_the_newest_by_structure_is_taken_and_said_to_be_so(tmp_path: Path, content_s: float) -> None:
    """Never from nothing: names, sizes and the manifest count, what a file holds is read another time."""
    save(tmp_path, 100)
    flipped, short = save(tmp_path, 120), save(tmp_path, 140)
    harm(flipped / "__0_0.distcp")
    (short / "sub/rng").write_bytes(b"cut off")

    search = find([str(tmp_path)], content_s=content_s)

    assert [(one.step, one.verified) for one in search.found] == [(120, False)]
    assert [Path(one.path).name for one in search.skipped] == [short.name]
    assert not examine(str(flipped), content_s=content_s).verified
    assert [(one.step, one.verified) for one in find([str(tmp_path)]).found] == [(100, True)]
    known = {str(flipped): search.found[0].saved_s}
    assert [one.step for one in find([str(tmp_path)], content_s=content_s, damaged=known).found] == [100]


def test_a_search_that_is_ended_has_remembered_file_by_file(
    tmp_path: Path, no_settling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next one goes on where it stood, and comes to an end some time."""
    monkeypatch.setattr(memory, "SAVE_EVERY_S", -1.0)
    save(tmp_path / "saved", 100)
    remembered = str(tmp_path / "verified.json")
    check, read = manifest.check_digest, list[str]()

    def out_of_time_at_the_last(entry: ManifestFile, sha256: str) -> None:
        read.append(entry.name)
        if entry.name == "sub/rng" and read.count("sub/rng") == 1:
            raise OutOfTimeError
        check(entry, sha256)

    monkeypatch.setattr(manifest, "check_digest", out_of_time_at_the_last)

    first = find([str(tmp_path / "saved")], memory=remembered)
    assert Path(remembered).read_text().count("sha256") == 1, "written before the end"
    second = find([str(tmp_path / "saved")], memory=remembered)

    assert [one.verified for one in (*first.found, *second.found)] == [False, True]
    assert sorted(read) == ["__0_0.distcp", "sub/rng", "sub/rng"]


def test_nodes_tell_checkpoints_of_one_name_apart_by_the_manifest(tmp_path: Path) -> None:
    for node, text in (("node-0", b"a"), ("node-1", b"a"), ("node-2", b"b")):
        path = save(tmp_path / node, 100)
        if text == b"b":
            manifest.write(str(path), replace(manifest.read(str(path)), run="another"))

    one, same, other = (
        find([str(tmp_path / node)], identify=True, content_s=0).found[0].identity
        for node in ("node-0", "node-1", "node-2")
    )

    assert one.startswith("step 100 manifest ")
    assert (one == same, one == other) == (True, False)


@pytest.mark.parametrize("name", ["__0_0.distcp", "sub/rng"])
def test_the_shares_of_the_nodes_are_together_all_files(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 100)
    harm(path / name)

    why: list[str] = []
    for node in range(3):
        try:
            assert not examine(str(path), share=(node, 3)).verified
        except Damaged as damaged:
            why.append(str(damaged))

    (only,) = why
    assert only.startswith(f"{name} has changed since it was written")


def harm(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
