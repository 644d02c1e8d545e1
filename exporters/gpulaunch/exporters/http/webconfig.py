"""Reads the endpoint's web configuration file (TLS, token), in the format of Prometheus exporters.

    tls_server_config:
      cert_file: server.crt
      key_file: server.key
      client_auth_type: RequireAndVerifyClientCert    # optional, with:
      client_ca_file: ca.crt
      min_version: TLS13                              # optional: TLS12 (default) or TLS13
    bearer_token_file: token                          # own key: Prometheus has `authorization: credentials_file`

File names are relative to it. Unsupported options (passwords, ciphers) are rejected, not ignored: the user relies on
them.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gpulaunch.profiler.files import regular

_T = TypeVar("_T")

_LARGEST_BYTES: Final = 64 << 10
_SHORTEST_TOKEN: Final = 16
_TLS: Final = "tls_server_config"
_TLS_KEYS: Final = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version")
_FILES: Final = ("cert_file", "key_file", "client_ca_file")
_CLIENT_AUTH: Final = {"NoClientCert": ssl.CERT_NONE, "RequireAndVerifyClientCert": ssl.CERT_REQUIRED}
_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class WebConfigError(ValueError):
    """The file cannot be used; the message is one line: why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class WebConfig:
    """How the endpoint is protected."""

    tls: ssl.SSLContext | None = None
    token: str | None = None


def read_web_config(file: str | Path) -> WebConfig:
    """Read the file and all files that it names.

    Raises:
        WebConfigError: it cannot be used.
    """
    path = Path(file)
    asked = _parse(_text(path, "the web config"), path)
    tls = asked.pop(_TLS, {}) or {}
    token_file = asked.pop("bearer_token_file", "")
    if "basic_auth_users" in asked:
        raise WebConfigError(f"{path}: basic_auth_users is not supported; use bearer_token_file")
    for name in asked:
        raise WebConfigError(f"{path}: {name} is not supported; known are {_TLS} and bearer_token_file")
    if not isinstance(tls, Mapping) or not isinstance(token_file, str):
        raise WebConfigError(f"{path}: {_TLS} has keys below it, bearer_token_file has a value")
    if not tls and not token_file:
        raise WebConfigError(f"{path}: protects nothing; give {_TLS} or bearer_token_file, or leave the option out")
    return WebConfig(
        tls=_context(tls, path) if tls else None,
        token=_token(path.parent / token_file) if token_file else None,
    )


def _text(path: Path, what: str) -> str:
    try:
        data = _read(path, _LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            raise WebConfigError(f"{what} {path} is larger than {_LARGEST_BYTES >> 10} KiB; is it the right file?")
        text = data.decode("utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        raise WebConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # invalid in text and in file names
        raise WebConfigError(f"{what} {path} is not text; is it the right file?")
    return text


def _read(path: Path, most: int) -> bytes:
    """Return the beginning of a file; a pipe in its place must not block startup. Raises OSError."""
    with open(path, "rb", opener=regular) as file:
        return file.read(most)


def _parse(text: str, path: Path) -> dict[str, Any]:
    """Return the two levels of the file; every value is text, as it is written."""
    import yaml  # type: ignore[import-untyped] # only if there is such a file: 1 MB in the sidecar

    def mapping(node: Any, levels: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            where = f"{path}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise WebConfigError(f"{where}: expected `key: value`")
            texts = [each.value for each in (key, value) if isinstance(each, yaml.ScalarNode)]
            if not "".join(texts).isprintable():
                raise WebConfigError(f"{where}: a name or a value that cannot be printed")
            if key.value in found:
                raise WebConfigError(f"{where}: {key.value} is there twice")
            if isinstance(value, yaml.ScalarNode):
                found[key.value] = value.value
            elif isinstance(value, yaml.MappingNode) and levels > 1:
                found[key.value] = mapping(value, levels - 1)
            else:
                raise WebConfigError(f"{where}: {key.value} has one value, as text")
        return found

    try:
        root = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise WebConfigError(f"{path}{where}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        raise WebConfigError(f"{path} is not YAML of this kind; is it the right file?") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise WebConfigError(f"{path}: expected `key: value`")
    return mapping(root, 2) if root is not None else {}


def _context(asked: Mapping[str, str], path: Path) -> ssl.SSLContext:
    for name in asked:
        if name not in _TLS_KEYS:
            raise WebConfigError(f"{path}: {_TLS}.{name} is not supported; known are {', '.join(_TLS_KEYS)}")
    missing = [name for name in ("cert_file", "key_file") if not asked.get(name)]
    if missing:
        raise WebConfigError(f"{path}: {_TLS} needs {' and '.join(missing)}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(_VERSIONS, asked, "min_version", "TLS12", path)
    authority = asked.get("client_ca_file")
    verify = _choice(
        _CLIENT_AUTH, asked, "client_auth_type", "RequireAndVerifyClientCert" if authority else "NoClientCert", path
    )
    if (verify is ssl.CERT_REQUIRED) != bool(authority):
        raise WebConfigError(f"{path}: client_ca_file and client_auth_type RequireAndVerifyClientCert go together")
    try:
        for name in _FILES:
            if asked.get(name):
                _read(path.parent / asked[name], 0)  # ssl opens the file itself, and would block on a pipe
        # ssl would prompt for a password on a terminal that does not exist: an empty one fails instead.
        context.load_cert_chain(path.parent / asked["cert_file"], path.parent / asked["key_file"], password="")
        if authority:
            context.load_verify_locations(path.parent / authority)
    except OSError as error:  # includes ssl.SSLError
        why = error.strerror if not isinstance(error, ssl.SSLError) else (error.reason or "not PEM")
        names = ", ".join(asked[name] for name in _FILES if asked.get(name))
        raise WebConfigError(f"{path}: cannot use the certificate or key ({names}): {why}") from None
    context.verify_mode = verify
    return context


def _choice(known: Mapping[str, _T], asked: Mapping[str, str], name: str, default: str, path: Path) -> _T:
    value = asked.get(name) or default
    if value not in known:
        raise WebConfigError(f"{path}: {_TLS}.{name} {value} is not supported; known are {', '.join(known)}")
    return known[value]


def _token(path: Path) -> str:
    token = _text(path, "bearer_token_file").strip()
    if len(token) < _SHORTEST_TOKEN or not re.fullmatch(r"[!-~]+", token):
        raise WebConfigError(f"{path}: a token is one word of at least {_SHORTEST_TOKEN} characters (ASCII)")
    return token
