"""A job that is told to announce its metrics, protect them, send them and push them: all options at once.

Who takes what is sent is a stand-in; see tests/push and tests/otlp for what they are sent.
"""

from __future__ import annotations

import http.client
import http.server
import json
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from needed import program

if TYPE_CHECKING:
    from tests.conftest import Launcher

WAIT_S = 60.0
TOKEN = "0123456789abcdef"
PROGRAM = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.05)
"""


class Heard:
    """Who takes what a job pushes (PUT) and sends (POST)."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.sent: list[ExportMetricsServiceRequest] = []


@pytest.fixture
def others() -> Iterator[tuple[str, Heard]]:
    heard = Heard()

    class Handler(http.server.BaseHTTPRequestHandler):
        def body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def do_PUT(self) -> None:
            assert b"gpulaunch_sidecar_refreshes_total" in self.body()
            heard.pushed.append(self.path)
            self.thanks()

        def do_POST(self) -> None:
            heard.sent.append(ExportMetricsServiceRequest.FromString(self.body()))
            self.thanks()

        def thanks(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", heard
        server.shutdown()
        thread.join()


@pytest.fixture
def protected(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """The file for --metrics-web-config, and a client that trusts its certificate."""
    program("openssl", package="openssl")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-keyout", "server.key", "-out", "server.crt", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "web.yml").write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\nbearer_token_file: token\n"
    )
    return tmp_path / "web.yml", ssl.create_default_context(cafile=str(tmp_path / "server.crt"))


def test_all_ways_out_at_once(
    gpulaunch: Launcher, tmp_path: Path, others: tuple[str, Heard], protected: tuple[Path, ssl.SSLContext]
) -> None:
    (url, heard), (web_config, trusting) = others, protected
    targets = tmp_path / "targets"
    targets.mkdir()
    (tmp_path / "wait.py").write_text(PROGRAM)
    asked: list[str | Path] = ["--metrics-sd", "targets", "--metrics-web-config", web_config]
    run = gpulaunch.start("--nproc", "1", *asked, "--metrics-push", url, "--metrics-otlp", url, "wait.py")

    until_s = time.monotonic() + WAIT_S
    while not (files := list(targets.glob("*.json"))):
        assert time.monotonic() < until_s, f"never announced\n{run.stdout}\n{run.stderr}"
        time.sleep(0.05)
    ((target,), (address,)) = (groups := json.loads(files[0].read_bytes())), groups[0]["targets"]
    labels = target["labels"]

    # As Prometheus asks: by the scheme that the target says, with the token of the scrape job.
    page = f"{labels['__scheme__']}://{address}/metrics"
    with_token = urllib.request.Request(page, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(with_token, timeout=WAIT_S, context=trusting) as answer:
        assert f'run="{labels["run"]}"' in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(page, timeout=WAIT_S, context=trusting)
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
        urllib.request.urlopen(page.replace("https", "http"), timeout=WAIT_S)
    assert page in run.stdout + run.stderr, "it says the address at which it is"

    (tmp_path / "go").touch()
    ended = run.wait(WAIT_S)

    assert ended.code == 0, ended
    assert list(targets.iterdir()) == []
    (pushed,) = heard.pushed
    assert pushed.startswith("/metrics/job/gpulaunch_ended/")
    assert pushed.endswith(f"/run/{labels['run']}")
    assert heard.sent
    (resource,) = heard.sent[-1].resource_metrics
    told = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (told["gpulaunch.run"], told["gpulaunch.name"]) == (labels["run"], labels["name"])


KILLS_ITS_SIDECAR = """
import json, os, signal, time
while not any(name.endswith(".json") for name in os.listdir("targets")):
    time.sleep(0.02)
with open(os.path.join(os.environ["GPULAUNCH_RUN_DIR"], "group.json")) as file:
    sidecar = json.load(file)["sidecar_pid"]
os.kill(sidecar, signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.alone
def test_a_sidecar_that_dies_as_the_run_ends_leaves_nothing_undone(
    gpulaunch: Launcher, tmp_path: Path, others: tuple[str, Heard]
) -> None:
    """Another one is due only after a pause, and the run ends before."""
    url, heard = others
    (tmp_path / "targets").mkdir()
    (tmp_path / "last.py").write_text(KILLS_ITS_SIDECAR)

    ended = gpulaunch("--nproc", "1", "--metrics-sd", "targets", "--metrics-push", url, "last.py")

    assert ended.code == 0, ended
    assert list((tmp_path / "targets").iterdir()) == []
    assert len(heard.pushed) == 1
