"""The example for Kubernetes: what the API would take, a command line of ours, and pods that Prometheus finds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpulaunch.launcher.cli import init
from gpulaunch.launcher.job import host_info
from gpulaunch.launcher.job.load import load
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.spec import METRICS_PORT_BASE, JobSpec
from gpulaunch.launcher.rendezvous.auth import read_token

SHIPPED = Path(__file__).parents[2] / "deploy/kubernetes"
OBJECTS: dict[str, dict[str, Any]] = {
    document["kind"]: document for document in yaml.safe_load_all((SHIPPED / "job.yaml").read_text())
}
POD: dict[str, Any] = OBJECTS["Job"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
NOTES: dict[str, str] = POD["metadata"]["annotations"]


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "Job"])
def test_the_objects_are_as_the_api_has_them(kind: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_a_planted_slip_is_found() -> None:
    """As the check above would."""
    slip = {**OBJECTS["Job"], "spec": {**OBJECTS["Job"]["spec"], "completion_mode": "Indexed"}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(slip, "1.31", strict=True)


def test_the_pods_find_each_other() -> None:
    """Pods of an indexed Job are named by their index in the service that their spec names."""
    name = OBJECTS["Job"]["metadata"]["name"]
    assert OBJECTS["Job"]["spec"]["completionMode"] == "Indexed"
    assert OBJECTS["Service"]["spec"]["clusterIP"] == "None"
    assert OBJECTS["Service"]["spec"]["selector"] == {"job-name": name}
    assert POD["spec"]["subdomain"] == OBJECTS["Service"]["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{POD['spec']['subdomain']}:29400" in CONTAINER["args"]
    assert f"--nnodes={OBJECTS['Job']['spec']['completions']}" in CONTAINER["args"]


def test_the_token_is_a_secret_that_is_mounted_and_nowhere_else() -> None:
    (volume,) = (volume for volume in POD["spec"]["volumes"] if "secret" in volume)
    (mount,) = (mount for mount in CONTAINER["volumeMounts"] if mount["name"] == volume["name"])
    assert f"--token-file={mount['mountPath']}/token" in CONTAINER["args"]
    assert mount["readOnly"]
    assert not any("secret" in str(variable).lower() for variable in CONTAINER["env"])


def test_the_metrics_are_served_where_the_annotation_says() -> None:
    port = NOTES["gpulaunch.io/port"]

    assert int(port) == METRICS_PORT_BASE
    assert f"--metrics-addr=0.0.0.0:{port}" in CONTAINER["args"]
    assert {"name": "metrics", "containerPort": int(port)} in CONTAINER["ports"]


def test_passing_trouble_does_not_fail_the_job() -> None:
    """By docs/exit-codes.md: 69 and 75 are run again and not counted, 2 and 93 are not run again."""
    rules = OBJECTS["Job"]["spec"]["podFailurePolicy"]["rules"]
    acted = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}

    assert {action: codes["values"] for action, codes in acted.items()} == {"Ignore": [69, 75], "FailJob": [2, 93]}
    assert {(codes["containerName"], codes["operator"]) for codes in acted.values()} == {(CONTAINER["name"], "In")}
    assert POD["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"


def test_the_container_has_no_more_rights_than_it_needs() -> None:
    pod, container = POD["spec"]["securityContext"], CONTAINER["securityContext"]

    assert POD["spec"]["automountServiceAccountToken"] is False
    assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert container["allowPrivilegeEscalation"] is False
    assert container["readOnlyRootFilesystem"] is True
    assert container["capabilities"] == {"drop": ["ALL"]}
    image = (SHIPPED.parent / "docker/Dockerfile").read_text()
    assert f"--uid {pod['runAsUser']} trainer" in image


def test_what_is_written_has_a_place_beside_the_read_only_root() -> None:
    """The run directory, the home directory, temporary files, shared memory: each is a volume."""
    mounted = {each["mountPath"]: each["name"] for each in CONTAINER["volumeMounts"]}
    (home,) = [each["value"] for each in CONTAINER["env"] if each["name"] == "HOME"]
    (job_dir,) = [each.partition("=")[2] for each in CONTAINER["args"] if each.startswith("--job-dir=")]

    for path in (home, job_dir, "/tmp", "/dev/shm"):
        assert any(Path(path).is_relative_to(mount) for mount in mounted), path
    assert set(mounted.values()) == {volume["name"] for volume in POD["spec"]["volumes"]}


def test_only_prometheus_reaches_the_metrics_from_elsewhere() -> None:
    policy = OBJECTS["NetworkPolicy"]["spec"]
    pods, elsewhere = policy["ingress"]

    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"]["matchLabels"] == OBJECTS["Service"]["spec"]["selector"]
    assert pods == {"from": [{"podSelector": policy["podSelector"]}]}
    assert elsewhere["ports"] == [{"port": int(NOTES["gpulaunch.io/port"]), "protocol": "TCP"}]


def test_shared_memory_is_more_than_a_container_gets() -> None:
    (mount,) = [each for each in CONTAINER["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    (volume,) = [each for each in POD["spec"]["volumes"] if each["name"] == mount["name"]]

    assert volume["emptyDir"]["medium"] == "Memory"


def discovered(promtool: str, tmp_path: Path, pods: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What Prometheus makes of pods. Debian's is built without Kubernetes: the pods come from a file here, as its
    discovery would have described them; the relabelling is the shipped one and Prometheus' own."""
    document = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["file_sd_configs"] = [{"files": ["pods.json"]}]
    del document["rule_files"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    groups = [{"targets": [pod.pop("__address__")], "labels": pod} for pod in pods]
    (tmp_path / "pods.json").write_text(json.dumps(groups))

    found = subprocess.run(
        [promtool, "check", "service-discovery", "--timeout=2s", tmp_path / "prometheus.yml", job["job_name"]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    targets: list[dict[str, Any]] = json.loads(found.stdout)
    return [target["labels"] for target in targets if target.get("labels")]


def pod(index: int, phase: str = "Running", **changed: str) -> dict[str, str]:
    meta = "__meta_kubernetes_pod_"
    notes = {f"{meta}annotation_{name.translate(str.maketrans('./-', '___'))}": value for name, value in NOTES.items()}
    return {
        "__address__": f"10.0.0.{index}:9464",
        "__meta_kubernetes_namespace": "vision",
        f"{meta}name": f"train-{index}-x7k2p",
        f"{meta}ip": f"10.0.0.{index}",
        f"{meta}phase": phase,
        f"{meta}node_name": f"gpu{index}",
        f"{meta}container_init": "false",
        f"{meta}label_batch_kubernetes_io_controller_uid": "5f0c",
        f"{meta}label_batch_kubernetes_io_job_name": "train",
        **notes,
        **changed,
    }


def test_the_pods_of_a_job_are_one_run(promtool: str, tmp_path: Path) -> None:
    ours = [pod(0), pod(1)]
    others = [
        pod(2, "Succeeded"),
        pod(3, "Pending"),
        pod(4, __meta_kubernetes_pod_annotation_gpulaunch_io_scrape="false"),
        pod(5, __meta_kubernetes_pod_container_init="true"),
    ]

    found = discovered(promtool, tmp_path, [*ours, *others])

    shown = ("__address__", "run", "name", "node", "pod")
    assert sorted(tuple(target[label] for label in shown) for target in found) == [
        ("10.0.0.0:9464", "5f0c", "train", "gpu0", "train-0-x7k2p"),
        ("10.0.0.1:9464", "5f0c", "train", "gpu1", "train-1-x7k2p"),
    ]


def test_pods_of_no_job_are_not_one_run(promtool: str, tmp_path: Path) -> None:
    """Each is known by the token that it tells itself; with one name for all of a namespace they would be mixed."""
    of_none = dict.fromkeys(
        (f"__meta_kubernetes_pod_label_batch_kubernetes_io_{name}" for name in ("controller_uid", "job_name")), ""
    )

    found = discovered(promtool, tmp_path, [pod(0, **of_none), pod(1, **of_none)])

    assert sorted((target["pod"], target.get("run", "")) for target in found) == [
        ("train-0-x7k2p", ""),
        ("train-1-x7k2p", ""),
    ]


FIELDS = {
    "metadata.labels['batch.kubernetes.io/controller-uid']": "5f0c",
    "metadata.labels['batch.kubernetes.io/job-name']": "train",
}
"""Of `pod` above, as the downward API gives them to the container."""


def in_pod(index: int) -> JobSpec:
    """What gpulaunch makes of the arguments as the kubelet has filled them in."""
    env = {
        each["name"]: FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in CONTAINER["env"]
        if "valueFrom" in each
    }
    env["JOB_COMPLETION_INDEX"] = str(index)  # given to the pods of an indexed Job
    filled = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], argument) for argument in CONTAINER["args"]]
    told = [argument.replace("--nproc=gpu", "--nproc=2") for argument in filled]  # there is no GPU here
    return load(told, {}, host_info.detect({})).spec


def test_a_run_is_called_in_its_pods_as_prometheus_calls_it(
    promtool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """...so that what is pushed at the end, or sent over OTLP, belongs to what was scraped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    (target,) = discovered(promtool, tmp_path, [pod(0)])

    assert [in_pod(index).metrics_run for index in range(2)] == [target["run"]] * 2


def test_the_command_is_one_that_gpulaunch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    spec = in_pod(1)

    assert (spec.nnodes, spec.node_rank, spec.master_addr, spec.master_port) == (2, 1, "train-0.train", 29400)
    assert spec.elastic is not None
    assert (spec.elastic.order, spec.elastic.join_timeout_s, spec.elastic.away_s) == (1, 1800.0, 1800.0)
    assert (spec.metrics_host, spec.metrics_port) == ("0.0.0.0", METRICS_PORT_BASE)


def test_the_example_is_what_init_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert init.run(["kubernetes", "--nodes", "2", "train.py"]) == 0

    assert capsys.readouterr().out == (SHIPPED / "job.yaml").read_text()


WORDS = ["--lr", "0.1", "a b", "true", "12:30", "$(HOME)", "a$$b", "{x}", "- x", "#", "", "\u00e9\n", "-", "a: b"]


def test_a_job_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the program's arguments are, it gets them; what the options say is in the objects."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "My_Train.py").touch()
    options = "--nodes 4 --min-nodes 2 --gpus 0 --cpus 3 --memory 9Gi --image r.io/a:1".split()
    assert init.run(["kubernetes", *options, "jobs/My_Train.py", *WORDS]) == 0

    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    for each in objects.values():
        kubernetes_validate.validate(each, "1.37", strict=True)
        assert each["metadata"]["name"] == "my-train"
    job = objects["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["completions"], job["parallelism"], container["image"]) == (4, 4, "r.io/a:1")
    assert container["resources"]["limits"] == {"memory": "9Gi"}
    assert container["resources"]["requests"] == {"cpu": "3", "memory": "9Gi"}
    at = container["args"].index("jobs/My_Train.py")
    assert [word.replace("$$", "$") for word in container["args"][at + 1 :]] == WORDS
    args = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    spec = load(args, {}, host_info.detect({})).spec
    assert spec.elastic is not None
    assert (spec.elastic.min_nodes, spec.elastic.max_nodes, spec.nproc) == (2, 4, 1)
    assert spec.master_addr == "my-train-0.my-train"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["kubernetes", "_.py"], "--name: Kubernetes takes small letters"),
        (["kubernetes", "--name", "A", "train.py"], "--name: Kubernetes takes small letters"),
        (["kubernetes", "--memory", "much", "train.py"], "expected a size as Kubernetes writes it"),
        (["kubernetes", "--time", "1:00", "train.py"], "--time is for slurm"),
        (["slurm", "--image", "x", "train.py"], "--image is for kubernetes"),
        (["kubernetes"], "PROGRAM"),
        (["token", "train.py"], "a token is not for a program: train.py; --out FILE says where to write it"),
    ],
)
def test_what_cannot_be_written(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        init.run(words)


def test_a_token_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    assert init.run(["token", "--out", str(tmp_path / "token")]) == 0
    assert init.run(["token", "--out", str(tmp_path / "other")]) == 0

    tokens = [read_token(str(tmp_path / name)) for name in ("token", "other")]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len({*tokens}) == 2
    with pytest.raises(UsageError, match="File exists"):
        init.run(["token", "--out", str(tmp_path / "token")])
