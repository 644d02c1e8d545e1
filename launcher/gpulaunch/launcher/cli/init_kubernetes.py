"""The manifest that `gpulaunch init kubernetes` writes: an indexed Job whose pods are the nodes of one run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gpulaunch.launcher.job.options import UsageError

_JOB = """\
# Written by `gpulaunch init kubernetes`. Change the image, sizes and the volume for checkpoints, then:
#   kubectl create secret generic {name}-token --from-literal=token="$(gpulaunch init token)"
#   kubectl apply -f FILE
# One pod is one node of the run: gpulaunch in it starts that node's ranks. The pods meet at the first one, by its name
# in the headless service; one that is replaced takes its place again, and the others wait for it with torch loaded.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None  # a name for each pod, and no proxy between them
  publishNotReadyAddresses: true  # the pods look for each other before they are ready
  selector:
    job-name: {name}
---
# The pods reach each other on every port (the store, NCCL); from elsewhere only Prometheus reaches them, and only the
# metrics. It needs a network plugin that enforces policies. Change the namespace to the one that Prometheus runs in.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
spec:
  podSelector:
    matchLabels:
      job-name: {name}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              job-name: {name}
    - from:
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: monitoring
      ports:
        - port: 9464
          protocol: TCP
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 6
  podFailurePolicy:
    rules:
      # The node was wanted for something else: that is no failure, and does not count against backoffLimit.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      # 69: a port is in use, or another gpulaunch still holds --job-dir. 75: told to end with a checkpoint to go on
      # from, or another node is gone. Neither says anything against the program (docs/exit-codes.md).
      - action: Ignore
        onExitCodes:
          containerName: {name}
          operator: In
          values: [69, 75]
      # 2 is a command line that is wrong, and stays wrong; 93 a failure that comes again and again.
      - action: FailJob
        onExitCodes:
          containerName: {name}
          operator: In
          values: [2, 93]
  template:
    metadata:
      annotations:
        # prometheus.yml beside this looks for these two; see docs/prometheus.md for the customary prometheus.io/ ones.
        gpulaunch.io/scrape: "true"
        gpulaunch.io/port: "9464"
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: 300  # to save in, when the pod is asked to go
      automountServiceAccountToken: false  # nothing here talks to the API server
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000  # the user of deploy/docker/Dockerfile
        runAsGroup: 1000
        fsGroup: 1000  # checkpoints can be written
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: {name}
          image: {image}
          command: [gpulaunch]
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
          env:
            # What libraries cache and compile goes to the one directory beside /checkpoints that can be written.
            - name: HOME
              value: /tmp
            # The Job's own id, which all its pods have, those that take the place of others too: what Prometheus calls
            # the run (prometheus.yml beside this), and what is pushed of it.
            - name: JOB_UID
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
          args:
            - --rdzv-id=$(JOB_UID)
            - --nnodes={nnodes}
            - --node-rank=$(JOB_COMPLETION_INDEX)
            - --rdzv-endpoint={name}-0.{name}:29400
            # How long to wait for a pod that is being replaced: images are pulled, machines start.
            - --rdzv-conf=join_timeout=1800,away_timeout=1800
            - --token-file=/token/token
            - --nproc={nproc}
            - --max-restarts=10
            - --metrics-addr=0.0.0.0:9464  # the default is this pod only
            - --job-dir=/checkpoints/{name}
{program}
          ports:
            - name: metrics
              containerPort: 9464
          resources:
            limits:
{gpus}              memory: {memory}
            requests:
              cpu: "{cpus}"
              memory: {memory}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            - name: shm
              mountPath: /dev/shm
            - name: checkpoints
              mountPath: /checkpoints
            - name: token
              mountPath: /token
              readOnly: true
      volumes:
        - name: token
          secret:
            secretName: {name}-token
            defaultMode: 0440
        - name: tmp
          emptyDir:
            sizeLimit: 16Gi
        # A container gets 64 MiB of shared memory unless told otherwise; batches go through it. It counts as memory.
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: 64Gi
        - name: checkpoints
          persistentVolumeClaim:
            claimName: checkpoints
"""
_PLAIN = re.compile(r"(--?)?[A-Za-z./]([\w./=+:-]*[\w./=+-])?", re.ASCII)
_RESERVED = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""YAML 1.1 takes these for something else than texts."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
"""A name of Kubernetes' objects (RFC 1123) that leaves room for what is put behind it, and begins with a letter."""


def manifest(
    program: Sequence[str],
    *,
    name: str,
    image: str,
    nodes: int,
    min_nodes: int,
    gpus: int,
    cpus: int,
    memory: str,
) -> str:
    """The objects in YAML: a headless Service, a NetworkPolicy and a Job.

    Args:
        program: the program and its arguments.
        name: of the objects, and of the container.
        image: the container image, with gpulaunch and the program in it.
        nodes: pods.
        min_nodes: the job goes on with so many.
        gpus: of each pod; 0: the program uses none.
        cpus: of each pod.
        memory: of each pod, as Kubernetes writes it.

    Raises:
        UsageError: Kubernetes would not take the name.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"init: --name: Kubernetes takes small letters, digits and dashes, at most 52, and a letter first: {name!r}"
        )
    return _JOB.format(
        name=name,
        image=_scalar(image),
        nodes=nodes,
        nnodes=f"{min_nodes}:{nodes}" if min_nodes < nodes else nodes,
        nproc="gpu" if gpus else 1,
        gpus=f"              nvidia.com/gpu: {gpus}\n" if gpus else "",
        cpus=cpus,
        memory=memory,
        program="\n".join(f"            - {_scalar(word)}" for word in program),
    )


def _scalar(text: str) -> str:
    text = text.replace("$", "$$")  # Kubernetes replaces $(VARIABLE), and $$ by $
    return text if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED else json.dumps(text)
