"""Our own checkpoints, by their manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import manifest
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
        "__0_0.distcp is not what was written": ("__0_0.distcp", bytes([shard[0] ^ 1]) + shard[1:]),
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
        with pytest.raises(Damaged, match="does not say what it must"):
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
