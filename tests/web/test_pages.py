"""What the endpoint gives a browser: the page, its parts, the run as JSON, and to whom."""

from __future__ import annotations

import gc
import gzip
import http.client
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import scenes
from kept_run import state
from scenes import EVIL, Served, as_document

from gpulaunch.exporters.http import Request, Response, server
from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.view.as_json import from_json
from gpulaunch.exporters.web import live_documents as documents
from gpulaunch.exporters.web import pages
from gpulaunch.exporters.web.live_documents import LiveDocument, LiveViews, PackedJson, run_dir_of

STATIC = Path(pages.__file__).parent / "static"
TOKEN = "correct horse battery"
Serve = Callable[..., Served]


def get(served: Served, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with closing(http.client.HTTPConnection(*served.address, timeout=30)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_everything_the_page_names_is_there_and_nothing_is_elsewhere(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, seconds=40))
    answer, body = get(served, "/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; script-src 'self'; ")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]

    elements = Elements(body.decode()).found
    named = [value for _, attributes in elements for key in ("src", "href") if (value := attributes.get(key))]
    for name in named:
        if not name.startswith("#"):
            assert get(served, f"/{name}")[0].status == (200 if name != "healthz" else 503), name  # its clock is ours
    assert sum(name.startswith("assets/plotly.js?v=") for name in named) == 1
    for name in pages.ASSETS:
        answer, _ = get(served, f"/assets/{name}")
        assert (answer.status, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")


def test_no_script_is_in_the_page_and_none_is_made() -> None:
    """HTML is read only by DOMParser, which runs nothing: the document of a run, as the server escaped it."""
    inline = [tag for tag, attributes in Elements((STATIC / "index.html").read_text()).found if "style" in attributes]
    assert inline == []
    scripts = [attributes for tag, attributes in Elements((STATIC / "index.html").read_text()).found if tag == "script"]
    assert all(attributes.get("src") for attributes in scripts)
    code = "".join(path.read_text() for path in pages.ASSETS.values() if path.suffix == ".js")
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "://"):
        assert forbidden not in code


def test_links_point_to_headings_and_labels_to_fields() -> None:
    elements = Elements((STATIC / "index.html").read_text()).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in elements:
        for key in ("for", "aria-labelledby"):
            assert key not in attributes or attributes[key] in ids
        href = attributes.get("href") or ""
        assert not href.startswith("#") or href[1:] in ids, tag


def test_the_parts_are_all_packed_with_the_package() -> None:
    assert sorted(path.name for path in STATIC.iterdir()) == ["icon.svg", "index.html", "live.js"]
    assert all(path.is_file() for path in pages.ASSETS.values())


def test_the_run_as_json_is_the_view(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, seconds=40))
    answer, body = get(served, "/api/run.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    view = from_json(as_document(body))
    assert (view.name, view.live, view.steps) == ("demo", True, 400)
    assert [finding.rule for finding in view.findings] == ["sync-every-step", "gc-pauses"]
    assert len(view.times_s) == len(view.ranks[0].steps_per_second) > 20


def test_it_comes_packed_to_who_can_unpack_it(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, seconds=40))
    _, plain = get(served, "/api/run.json")
    answer, packed = get(served, "/api/run.json", accept_encoding="gzip, br")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 3


@pytest.mark.parametrize(
    ("header", "as_it_is"),
    [("GZIP", False), ("br, Gzip;q=0.8", False), ("gzip;q=0", True), ("notgzip", True), ("gzip;q=0.3, identity", True)],
)
def test_nothing_comes_packed_to_who_says_that_it_cannot_unpack_it(
    serve: Serve, tmp_path: Path, header: str, as_it_is: bool
) -> None:
    served = serve(scenes.live(tmp_path, seconds=5))
    for path in ("/", "/assets/page.css", "/assets/plotly.js", "/api/run.json", "/api/page.json"):
        answer, _ = get(served, path, accept_encoding=header)
        assert answer.headers["Content-Encoding"] == (None if as_it_is else "gzip"), path
        assert answer.headers["Vary"] == "Accept-Encoding"


def test_who_has_it_already_gets_nothing_until_there_is_something_new(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, seconds=40))
    for path in ("/", "/assets/page.css", "/api/run.json", "/api/page.json"):
        answer, _ = get(served, path)
        again, body = get(served, path, if_none_match=f'"other", W/{answer.headers["ETag"]}')
        assert (again.status, body) == (304, b"")
        assert again.headers["Content-Type"] is None
        assert get(served, path, if_none_match='"other"')[0].status == 200


def test_before_the_first_look_and_before_the_first_rank(serve: Serve, tmp_path: Path) -> None:
    for path in ("/api/run.json", "/api/page.json"):
        assert as_document(get(serve(scenes.starting(tmp_path)), path)[1]) == {"version": 1, "starting": True}
    view = from_json(as_document(get(serve(scenes.empty(tmp_path)), "/api/run.json")[1]))
    assert (view.ranks, view.steps) == ((), 0)


def test_hostile_text_arrives_as_text(serve: Serve, tmp_path: Path) -> None:
    answer, body = get(serve(scenes.hostile(tmp_path)), "/api/run.json")
    view = from_json(as_document(body))
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert view.name == EVIL
    assert view.findings[0].rule == EVIL
    assert EVIL in view.sites[0].text


def test_the_page_has_the_document_of_the_report(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, ranks=range(9), seconds=40))
    told = as_document(get(served, "/api/page.json")[1])
    assert (told["title"], told["running"]) == ("demo: running - gpulaunch", True)
    assert told["findings"] == ["sync-every-step train.py:88", "gc-pauses"]
    assert told["ranks"] == list(range(9))
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", told["body"])
    view = from_json(as_document(get(served, "/api/run.json")[1]))
    document = report_of(view, every_rank=True)
    assert headings == [section.title for section in document.sections]
    assert [chart["id"] for chart in told["charts"]] == [chart.id for chart in document.charts()]


def test_without_the_chart_library_the_page_asks_for_none(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path), plotly=False)
    assert b"plotly" not in get(served, "/")[1]
    assert get(served, "/assets/plotly.js")[0].status == 404


def test_the_chart_library_is_that_of_its_package_and_kept_for_long(serve: Serve, tmp_path: Path) -> None:
    found = pages.installed_plotly()
    assert found is not None
    served = serve(scenes.empty(tmp_path))
    answer, packed = get(served, "/assets/plotly.js?v=1", accept_encoding="gzip")
    assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert gzip.decompress(packed) == get(served, "/assets/plotly.js")[1] == found.path.read_bytes()
    page = pages.pages(lambda: None, lambda: None)["/assets/plotly.js"]
    plain = Request(method="GET", path="/assets/plotly.js", host=None, accept="", minor=1)
    one, other = page(plain), page(plain)
    assert isinstance(one, Response)
    assert isinstance(other, Response)
    assert one.body is other.body, "who does not read it shares it with the others"


def test_whoever_scrapes_does_not_wait_for_the_page(serve: Serve, tmp_path: Path, monkeypatch) -> None:
    """The view hangs on a file system that does not answer; metrics and health are served, then the page is."""
    go_on = threading.Event()
    make = documents.view_of_state

    def hang(*args, **more):
        assert go_on.wait(30)
        return make(*args, **more)

    monkeypatch.setattr(documents, "view_of_state", hang)
    served = serve(scenes.live(tmp_path, seconds=5))
    answers: list[int] = []
    waiting = [threading.Thread(target=lambda: answers.append(get(served, "/api/run.json")[0].status)) for _ in "ab"]
    for thread in waiting:
        thread.start()
    try:
        assert get(served, "/metrics")[0].status == 200
        assert answers == []
    finally:
        go_on.set()
        for thread in waiting:
            thread.join()
    assert answers == [200, 200]


@pytest.mark.parametrize(
    ("path", "module", "maker"),
    [
        ("/api/run.json", documents, "view_of_state"),
        ("/api/page.json", documents, "view_of_state"),
        ("/assets/plotly.js", pages, "packed"),
    ],
)
def test_while_it_hangs_nothing_is_kept_of_who_has_left(
    serve: Serve, tmp_path: Path, monkeypatch, path: str, module: ModuleType, maker: str
) -> None:
    """A page that asks every second, for days, must not fill the memory; who still waits in the end is answered."""
    go_on = threading.Event()
    make = getattr(module, maker)

    def hang(*args, **more):
        assert go_on.wait(30)
        return make(*args, **more)

    monkeypatch.setattr(module, maker, hang)
    found = pages.installed_plotly()
    assert found is not None
    nobody_has_read = Path(shutil.copy(found.path, tmp_path))
    monkeypatch.setattr(scenes, "installed_plotly", lambda: replace(found, path=nobody_has_read))
    served = serve(scenes.live(tmp_path, seconds=5), max_connections=4)
    ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n".encode()
    try:
        for _ in range(100):
            with socket.create_connection(served.address, timeout=30) as client:
                client.sendall(ask)
        assert get(served, "/metrics")[0].status == 200  # so all of them have been heard
        gc.collect()
        assert sum(type(each).__module__ == server.__name__ for each in gc.get_objects()) <= 20
        with socket.create_connection(served.address, timeout=30) as last:
            last.sendall(ask)
            go_on.set()
            assert last.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        go_on.set()


def test_a_view_that_cannot_be_made_is_our_fault_and_tried_again(serve: Serve, tmp_path: Path, monkeypatch) -> None:
    served = serve(scenes.live(tmp_path, seconds=5))
    with monkeypatch.context() as broken:
        broken.setattr(documents, "view_of_state", lambda *_, **__: 1 / 0)
        answer, body = get(served, "/api/run.json")
        assert (answer.status, body) == (500, b"500 Internal Server Error\n")
    assert get(served, "/api/run.json")[0].status == 200


def test_a_document_is_made_once_for_a_state_and_not_before_its_rest_is_over() -> None:
    """Making one takes a second by this clock: the next comes nine later, however many ask."""
    seen = [state(10.0)]
    ticks = iter(range(10**6))
    now = [0.0]
    made: list[int] = []

    def make(state):
        made.append(state.taken_monotonic_ns)
        now[0] += 1.0
        return {"made": len(made)}

    slow = LiveDocument(lambda: seen[0], make, clock=lambda: now[0] + next(ticks) * 1e-9)

    def body() -> dict[str, int]:
        newest = slow.newest()
        document = newest.result(30) if isinstance(newest, Future) else newest
        assert isinstance(document, PackedJson)
        return json.loads(document.body)

    assert [body(), body()] == [{"made": 1}] * 2
    seen[0] = state(11.0)
    assert body() == {"made": 1}
    now[0] += 9.1
    assert body() == {"made": 2}
    assert len(made) == 2


def test_what_is_of_now_is_of_the_last_seconds_where_no_file_has_it(tmp_path: Path) -> None:
    seen = [state(10.0)]
    live = LiveViews(lambda: None)

    def view():
        return live.of(seen[0])

    assert view().steps_per_second_now is None
    for second in range(11, 30):
        seen[0] = state(float(second))
        newest = view()
    assert newest.steps_per_second_now == pytest.approx(10.0)
    assert 4.0 <= newest.recent_seconds <= 7.0

    seen[0] = state(10_800.0)  # nobody has looked for hours
    assert view().steps_per_second_now is None
    seen[0] = state(10_805.0)
    assert view().steps_per_second_now == pytest.approx(10.0)


def test_the_run_directory_is_the_one_that_the_agent_names(tmp_path: Path) -> None:
    assert run_dir_of(tmp_path) is None
    (tmp_path / "group.json").write_text("[]")
    assert run_dir_of(tmp_path) is None
    (tmp_path / "group.json").write_text('{"run_dir": "/there"}')
    assert run_dir_of(tmp_path) == Path("/there")


def test_with_a_token_only_what_is_the_same_for_everyone_is_for_everyone(serve: Serve, tmp_path: Path) -> None:
    served = serve(scenes.live(tmp_path, seconds=5), token=TOKEN)
    for path in ("/metrics", "/api/run.json", "/api/page.json", "/nowhere"):
        answer, body = get(served, path)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="gpulaunch"')
        assert body == b"401 Unauthorized\n"
    for path in sorted(pages.PUBLIC):
        answer, body = get(served, path)
        assert answer.status in (200, 503)
        assert b"train.py" not in body
    assert get(served, "/metrics", authorization=f"Bearer {TOKEN}")[0].status == 200
    assert get(served, "/api/run.json", authorization=f"bearer {TOKEN}")[0].status == 200


def test_an_endpoint_for_all_addresses_shows_the_page_under_no_strange_name(tmp_path: Path) -> None:
    """A web page can point a name of its own there, and read: metrics may be asked for by any name, the run not."""
    from gpulaunch.exporters.http import RequestGuard

    wildcard = RequestGuard("0.0.0.0", "node7.cluster")
    for host in ("evil.example", "node7.evil.example"):
        assert wildcard.admits(host)
        assert not wildcard.admits(host, strange_names=False)
    for host in ("10.1.2.3:9464", "[fd00::1]:9464", "localhost", "node7", "node7.cluster:9464"):
        assert wildcard.admits(host, strange_names=False)


def test_every_rank_more_makes_the_curves_coarser(serve: Serve, tmp_path: Path) -> None:
    scene = scenes.live(tmp_path, ranks=range(4), seconds=90)
    assert scene.state is not None
    assert scene.state.group is not None
    few = as_document(get(serve(scene), "/api/run.json")[1])
    many = replace(scene, state=replace(scene.state, group=replace(scene.state.group, world_size=64)))
    coarse = as_document(get(serve(many), "/api/run.json")[1])
    assert len(few["times_s"]) > len(coarse["times_s"]) > 20


def test_the_colours_have_the_contrast_that_is_said(tmp_path: Path) -> None:
    """WCAG 2.2: 4.5 for text, 3 for lines, areas and borders of state; in both schemes, on every ground they stand."""
    light, dark, _ = re.findall(r":root \{(.*?)\}", pages.ASSETS["page.css"].read_text(), re.DOTALL)
    schemes = {"light": colours(light), "dark": {**colours(light), **colours(dark)}}
    assert set(colours(light)) == set(colours(dark))
    for scheme, of in schemes.items():
        for ground in ("back", "panel"):
            for text in ("text", "quiet", "link", "good", "bad"):
                assert contrast(of[text], of[ground]) >= 4.5, (scheme, text, ground)
        assert contrast(of["warn"], of["warn-back"]) >= 4.5
        for number in range(12):
            assert contrast(of[f"s{number}"], of["panel"]) >= 3, (scheme, number)


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def colours(rules: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", rules))


def contrast(one: str, other: str) -> float:
    lights = sorted((light(one), light(other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
