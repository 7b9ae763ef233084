"""What is deployed: manifests that Kubernetes takes, with a configuration inside that the gateway takes."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.cli.checks import find_mapping_faults, rehearse_declarations
from gateway.mapping.linter import Severity
from gateway.settings import Settings, load_settings
from gateway.settings.engine import RabbitEngine
from tests.deploy.programs import DEPLOY, tool

FOLDER: Final = DEPLOY / "kubernetes"
VERSIONS: Final = ("1.31", "1.35")  # of Kubernetes, whose own schemas the validator brings along
FILES = sorted(FOLDER.glob("*.yaml"))
OPERATOR: Final = "rabbitmq.com/v1beta1"  # of which no schema comes with Kubernetes
DOCUMENTS = [
    pytest.param(document, id=f"{path.name}:{document['kind']}")
    for path in FILES
    for document in yaml.safe_load_all(path.read_text())
    if document["apiVersion"] != OPERATOR
]


def documents(path: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == kind]


def workload(path: Path) -> dict[str, Any]:
    (found,) = [*documents(path, "Deployment"), *documents(path, "StatefulSet")]
    return found


def configured(path: Path, folder: Path) -> Settings:
    """The settings of a manifest's ConfigMap, with its mapping files put into `folder`."""
    (held,) = documents(path, "ConfigMap")
    return loaded(held["data"], folder)


def loaded(files: dict[str, str], folder: Path) -> Settings:
    """The settings of these files, put where gateway.yaml looks for them."""
    (folder / "mappings").mkdir(exist_ok=True)
    for name, text in files.items():
        place = folder if name == "gateway.yaml" else folder / "mappings"
        text = text.replace("/etc/gateway/mappings/", f"{folder}/mappings/")
        (place / name).write_text(text.replace("/etc/gateway/", f"{folder}/mappings/"))
    return load_settings(folder / "gateway.yaml", {})


def taken(files: dict[str, str], folder: Path) -> Settings:
    """The same, after the gateway has found nothing wrong with them."""
    settings = loaded(files, folder)
    rehearsed = rehearse_declarations(settings)
    found = [*rehearsed.findings, *find_mapping_faults(settings, rehearsed)]
    assert [one for one in found if one.severity is not Severity.NOTE] == []
    return settings


def validate(document: dict[str, Any], version: str) -> None:
    """Raises what the validator does. It takes seconds to import, which every run of tests would wait for."""
    importlib.import_module("kubernetes_validate").validate(document, version, strict=True)


@pytest.mark.needs("time")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_kubernetes_takes_it(document: dict[str, Any], version: str) -> None:
    validate(document, version)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_gateway_takes_its_configuration(path: Path, tmp_path: Path) -> None:
    (held,) = documents(path, "ConfigMap")
    taken(held["data"], tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_pod_is_probed_bounded_and_unprivileged(path: Path, tmp_path: Path) -> None:
    pod = workload(path)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > configured(path, tmp_path).drain_timeout_secs
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    (gateway,) = [one for one in containers if one["name"] == "gateway"]
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for container in containers:
        assert container["resources"]["requests"].keys() == {"cpu", "memory", "ephemeral-storage"}
        assert container["resources"]["limits"].keys() == {"memory", "ephemeral-storage"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_sidecar_that_is_rolled_out_has_its_name_and_volume_again(tmp_path: Path) -> None:
    path = FOLDER / "sidecar.yaml"
    settings = configured(path, tmp_path)
    rolled = workload(path)
    assert rolled["kind"] == "StatefulSet"
    assert [link.client_id for link in settings.links.values()] == ["{replica}"]
    (gateway,) = rolled["spec"]["template"]["spec"]["initContainers"]
    assert gateway["restartPolicy"] == "Always", "a sidecar, which goes on beside the application"
    assert gateway["startupProbe"]["httpGet"]["path"] == "/livez", "which starts when the gateway is there"
    (claim,) = rolled["spec"]["volumeClaimTemplates"]
    mounted = {one["name"]: one["mountPath"] for one in gateway["volumeMounts"]}
    assert mounted[claim["metadata"]["name"]] == "/var/lib/gateway", "where the image has its store"
    (service,) = documents(path, "Service")
    assert service["metadata"]["name"] == rolled["spec"]["serviceName"]


def test_kube_score_finds_nothing_critical() -> None:
    assert "[CRITICAL]" not in tool("kube-score", "score", *FILES, "--output-format", "ci")


@pytest.mark.parametrize("name", ["service.yaml", "replicas.yaml"])
def test_a_service_leads_to_the_ports_of_the_pod(name: str) -> None:
    path = FOLDER / name
    (service,), (deployment,) = documents(path, "Service"), documents(path, "Deployment")
    ports = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_replicas_log_in_as_a_user_that_may_do_what_they_need(tmp_path: Path) -> None:
    """The one of the guide, which is tested with it, and not the operator's administrator."""
    path = FOLDER / "replicas.yaml"
    (cluster,), (user,), (permission,) = (
        documents(path, kind) for kind in ("RabbitmqCluster", "User", "Permission")
    )
    secret = user["spec"]["importCredentialsSecret"]["name"]
    pod = workload(path)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = [one["name"] for one in pod["volumes"] if one.get("secret", {}).get("secretName") == secret]
    (mounted,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == volume]
    settings = configured(path, tmp_path)
    assert isinstance(settings.broker, RabbitEngine)
    username = urlsplit(settings.broker.urls[0]).username
    assert username == user["metadata"]["name"]
    assert str(settings.broker.password_file) == f"{mounted}/password"
    assert [address.split(":")[0] for address in settings.broker.addresses] == [cluster["metadata"]["name"]]
    assert permission["spec"]["userReference"]["name"] == user["metadata"]["name"]
    page = (DEPLOY.parent / "docs" / "guides" / "replicas.md").read_text()
    (command,) = re.findall(r"^\$ rabbitmqctl (set_permissions .*)$", page, re.MULTILINE)
    given = permission["spec"]["permissions"]
    words = ["set_permissions", "-p", permission["spec"]["vhost"], username]
    assert shlex.split(command) == [*words, given["configure"], given["write"], given["read"]]
    assert command in (DEPLOY / "helm" / "replicas.yaml").read_text()
    assert settings.broker.namespace == "plant"
