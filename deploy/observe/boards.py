"""A Grafana with the shipped dashboards, in a directory of its own. Never tried: no Grafana server was to be had."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from server import SCRAPE_S, get

HOME: Final = "/d/gpulaunch-overview"

_SHIPPED: Final = Path(__file__).resolve().parents[1] / "grafana"
_DASHBOARDS: Final = _SHIPPED / "dashboards"
_PACKAGE: Final = Path("/usr/share/grafana")
_DEFAULTS: Final = "conf/defaults.ini"


def configure(directory: Path, prometheus: str) -> dict[str, str]:
    """Write what it is provisioned with: the shipped files, for that Prometheus; give its environment."""
    home = directory / "grafana"
    told = {
        "http://127.0.0.1:9090": f"http://{prometheus}",
        "timeInterval: 15s": f"timeInterval: {SCRAPE_S}s",
        "/var/lib/grafana/dashboards/gpulaunch": json.dumps(str(_DASHBOARDS)),
    }
    for kind in ("datasources", "dashboards"):
        (home / "provisioning" / kind).mkdir(parents=True)
        for shipped in sorted((_SHIPPED / "provisioning" / kind).glob("*.yaml")):
            (home / "provisioning" / kind / shipped.name).write_text(_instead(shipped.read_text(), told))
    settings = {
        "PATHS_DATA": str(home / "data"),
        "PATHS_LOGS": str(home / "logs"),
        "PATHS_PLUGINS": str(home / "plugins"),
        "PATHS_PROVISIONING": str(home / "provisioning"),
        "SERVER_HTTP_ADDR": "127.0.0.1",
        "SERVER_HTTP_PORT": str(_free_port()),
        # Whoever is on this machine may look, and nobody may change anything.
        "AUTH_ANONYMOUS_ENABLED": "true",
        "AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "SECURITY_ADMIN_PASSWORD": secrets.token_urlsafe(),
        "ANALYTICS_REPORTING_ENABLED": "false",
        "ANALYTICS_CHECK_FOR_UPDATES": "false",
        "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "NEWS_NEWS_FEED_ENABLED": "false",
        "DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(_DASHBOARDS / "gpulaunch-overview.json"),
    }
    return {**os.environ, **{f"GF_{name}": value for name, value in settings.items()}}


def command(binary: str) -> list[str]:
    """Give what it is started with. It wants to know where its own files are, and looks in the current directory."""
    beside = Path(binary).resolve().parents[1]
    homes = [each for each in (beside, _PACKAGE) if (each / _DEFAULTS).exists()]
    return [binary, *(f"--homepath={each}" for each in homes[:1])]


def address(env: Mapping[str, str]) -> str | None:
    """Where it serves, once it does."""
    at = f"{env['GF_SERVER_HTTP_ADDR']}:{env['GF_SERVER_HTTP_PORT']}"
    return at if get(at, "/api/health") is not None else None


def _instead(text: str, told: Mapping[str, str]) -> str:
    for before, now in told.items():
        text = text.replace(before, now)
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
