"""The file that says how the endpoint is protected: what it may say, and one line for everything else."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.http import WebConfigError, read_web_config
from needed import program

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, a key that is not its, an encrypted key, a token."""
    program("openssl", package="openssl")
    folder = tmp_path_factory.mktemp("tls")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    new += ["-subj", "/CN=localhost"]
    for name, how in (("server", ["-nodes"]), ("other", ["-nodes"]), ("locked", ["-passout", "pass:secret"])):
        argv = [*new, *how, "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "short").write_text("secret\n")
    (folder / "words").write_text("two words, and long enough\n")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(folder / "pipe")
    return folder


def test_tls_and_a_token_with_names_relative_to_the_file(folder: Path) -> None:
    path = folder / "web.yml"
    path.write_text(
        "---\n# how it is protected\ntls_server_config:\n  cert_file: 'server.crt'   # ours\n"
        '  key_file: "server.key"\n  min_version: TLS13\n\nbearer_token_file: token\n'
    )

    config = read_web_config(path)

    assert config.token == TOKEN
    assert config.tls is not None
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_3
    assert config.tls.verify_mode is ssl.CERT_NONE


def test_any_yaml_that_says_the_same_is_read(folder: Path) -> None:
    path = folder / "web.yml"
    path.write_text('{"bearer_token_file": "token"}\n')

    assert read_web_config(path).token == TOKEN


def test_clients_may_be_asked_for_a_certificate(folder: Path) -> None:
    path = folder / "web.yml"
    path.write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  client_ca_file: other.crt\n"
    )

    config = read_web_config(path)

    assert config.tls is not None
    assert config.tls.verify_mode is ssl.CERT_REQUIRED
    assert config.tls.minimum_version is ssl.TLSVersion.TLSv1_2


TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "protects nothing"),
        ("tls_server_config:\n", "protects nothing"),
        ("basic_auth_users:\n  alice: $2y$10$abc\n", "basic_auth_users is not supported; use bearer_token_file"),
        ("http_server_config:\n  http2: false\n", "http_server_config is not supported"),
        ("tls_server_config:\n  cipher_suites: x\n", "tls_server_config.cipher_suites is not supported"),
        ("tls_server_config:\n  cert_file: server.crt\n", "needs key_file"),
        ("tls_server_config: server.crt\n", "has keys below it"),
        ("bearer_token_file:\n  a: b\n", "has a value"),
        (TLS + "  min_version: TLS10\n", "min_version TLS10 is not supported; known are TLS12, TLS13"),
        (TLS + "  client_auth_type: RequestClientCert\n", "client_auth_type RequestClientCert is not supported"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", "go together"),
        (TLS + "  client_auth_type: NoClientCert\n  client_ca_file: other.crt\n", "go together"),
        (TLS.replace("server.key", "other.key"), "cannot use the certificate or key (server.crt, other.key)"),
        (TLS.replace("server.key", "locked.key").replace("server.crt", "locked.crt"), "cannot use the certificate"),
        (TLS.replace("server.key", "token"), "cannot use the certificate or key (server.crt, token)"),
        (TLS.replace("server.key", "nowhere"), "No such file"),
        ("bearer_token_file: nowhere\n", "cannot read bearer_token_file"),
        ("bearer_token_file: short\n", "at least 16 characters"),
        ("bearer_token_file: words\n", "one word"),
        ("bearer_token_file: binary\n", "is not text"),
        ("bearer_token_file: pipe\n", "cannot read bearer_token_file"),
        (TLS.replace("server.crt", "pipe"), "(pipe, server.key): not a regular file"),
        (TLS.replace("server.key", "pipe"), "(server.crt, pipe): not a regular file"),
        (TLS + "  client_ca_file: pipe\n", "(server.crt, server.key, pipe): not a regular file"),
        ("bearer_token_file: to\0ken\n", "is not text"),
        (TLS.replace("server.crt", "server\0.crt"), "is not text"),
        ("bearer_token_file: [token]\n", "line 1: bearer_token_file has one value"),
        ("bearer_token_file: 'token\n", "unexpected end of stream"),
        ("bearer_token_file: token\nbearer_token_file: token\n", "line 2: bearer_token_file is there twice"),
        ("tls_server_config:\n  cert_file:\n    a: b\n", "line 2: cert_file has one value"),
        ("tls_server_config: &a\n  cert_file: *a\n", "line 2: cert_file has one value"),
        ("  cert_file: x\n", "cert_file is not supported"),
        ("\tcert_file: x\n", "line 1: found character"),
        ("a: b\n  c: d\n", "line 2: mapping values are not allowed here"),
        ("- a\n", "expected `key: value`"),
        ("? [a]\n: b\n", "line 1: expected `key: value`"),
        ("[" * 9000, "is not YAML of this kind"),
        ('bearer_token_file: "a\\0b"\n', "line 1: a name or a value that cannot be printed"),
        ('bearer_token_file: "\\uD800"\n', "line 1: a name or a value that cannot be printed"),
        ('"a\\nb": c\n', "line 1: a name or a value that cannot be printed"),
        ('bearer_token_file: "\\UFFFFFFFF"\n', "is not YAML of this kind"),
        ("%YAML 1." + 5000 * "9" + "\n---\na: b\n", "is not YAML of this kind"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(folder: Path, text: str, says: str) -> None:
    path = folder / "web.yml"
    path.write_text(text)

    with pytest.raises(WebConfigError) as caught:
        read_web_config(path)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"cannot read the web config .*web\.yml: No such file"):
        read_web_config(tmp_path / "web.yml")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "web.yml")
    with pytest.raises(WebConfigError, match=r"cannot read the web config .*web\.yml: not a regular file"):
        read_web_config(tmp_path / "web.yml")


def test_a_mark_at_the_beginning_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Editors of other systems begin a file with U+FEFF."""
    (tmp_path / "web.yml").write_text("bearer_token_file: token\n", encoding="utf-8-sig")
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8-sig")
    assert read_web_config(tmp_path / "web.yml").token == TOKEN


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_bytes(b"#" * (1 << 20))
    with pytest.raises(WebConfigError, match="is larger than 64 KiB"):
        read_web_config(tmp_path / "web.yml")


@given(st.text(alphabet="abct_: '\"#\n-\\{[&*\xe9\t0", max_size=80))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yml"
    path.write_text(text)
    with pytest.raises(WebConfigError) as caught:  # nothing of this alphabet protects anything
        read_web_config(path)
    assert str(path) in str(caught.value)
