"""The chart: helm takes it, Kubernetes what it renders, and the gateway the configuration inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway import __version__
from tests.deploy.programs import DEPLOY, tool
from tests.deploy.test_kubernetes import VERSIONS, taken, validate

CHART: Final = DEPLOY / "helm" / "gateway"
OPERATOR: Final = ("ServiceMonitor", "PrometheusRule")  # of which no schema comes with Kubernetes
BRIDGE: Final = {
    "config": {
        "listeners": {
            "mqtt": {"protocol": "mqtt", "port": 1884, "qos_max": 1},
            "A_very.long-name": {"protocol": "amqpfast", "port": 3018},
        },
        "links": {"erp": {"url": "amqp://gateway@rabbitmq:5672", "password_file": "rabbitmq"}},
        "drain_timeout_secs": 42.5,
        "http": {"port": 9000},
    },
    "mappings": {
        "plant.yaml": {
            "version": 1,
            "routes": [
                {
                    "name": "up",
                    "from": {"endpoint": "mqtt", "topic": "plant/{rest...}"},
                    "to": {"endpoint": "erp", "exchange": "amq.topic", "routing_key": "{rest}"},
                },
                {
                    "name": "jobs",
                    "from": {"endpoint": "A_very.long-name", "service": "queue", "destination": "jobs"},
                    "to": {"endpoint": "erp", "queue": "jobs"},
                },
            ],
        }
    },
    "secretName": "own",
    "tlsSecretName": "certificate",
    "replicas": 3,
    "imagePullSecrets": [{"name": "registry"}],
    "service": {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["192.0.2.0/24"],
        "annotations": {"example.org/kind": "network"},
    },
    "persistence": {"storageClassName": "fast", "size": "100Gi"},
    "autoscaling": {"enabled": True, "maxReplicas": 7},
    "networkPolicy": {
        "clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "egress": [{"ports": [{"port": 5672}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "podLabels": {"team": "plant"},
    "podAnnotations": {"note": "yes"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "edge", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "extraEnv": [{"name": "GATEWAY_LOG__LEVEL", "value": "debug"}],
}
WITHOUT: Final = {
    "persistence": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "topologySpreadConstraints": [],
}
CASES: Final[dict[str, dict[str, Any]]] = {
    "as it is": {},
    "all": BRIDGE,
    "nothing": WITHOUT,
    "replicas": yaml.safe_load((DEPLOY / "helm" / "replicas.yaml").read_text()),
}


def rendered(values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    given = ("-f", folder / "values.yaml", "--kube-version", "1.33.0")
    text = tool("helm", "template", "edge", CHART, *given)
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(found: list[dict[str, Any]], kind: str, name: str = "edge-gateway") -> dict[str, Any]:
    (one,) = [one for one in found if one["kind"] == kind and one["metadata"]["name"] == name]
    return one


def configured(found: list[dict[str, Any]]) -> dict[str, str]:
    """What pods have in /etc/gateway, by name."""
    held = [one for one in found if one["kind"] == "ConfigMap" and "dashboard" not in one["metadata"]["name"]]
    return {name: text for one in held for name, text in one["data"].items()}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_and_the_gateway_take_it(values: dict[str, Any], tmp_path: Path) -> None:
    found = rendered(values, tmp_path)
    for one in found:
        if one["kind"] not in OPERATOR:
            for version in VERSIONS:
                validate(one, version)
    settings = taken(configured(found), tmp_path)
    pod = of_kind(found, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.drain_timeout_secs
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    listening = {listener.port for listener in settings.listeners.values()}
    assert set(ports.values()) == listening | {settings.http.port}
    assert all(len(name) <= 15 for name in ports)
    named = {port["targetPort"] for one in found if one["kind"] == "Service" for port in one["spec"]["ports"]}
    assert named == ports.keys()


@pytest.mark.parametrize("values", [{}, BRIDGE], ids=["as it is", "all"])
def test_kube_score_finds_nothing_critical(values: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump_all(one for one in rendered(values, tmp_path) if one["kind"] not in OPERATOR)
    assert "[CRITICAL]" not in tool("kube-score", "score", "-", "--output-format", "ci", given=text)


def test_a_changed_configuration_rolls_pods_out_and_a_changed_mapping_does_not(tmp_path: Path) -> None:
    def noted(values: dict[str, Any]) -> str:
        pod = of_kind(rendered(values, tmp_path), "StatefulSet")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/configuration"])

    mapping = {"version": 1, "routes": []}
    assert noted(BRIDGE) == noted(BRIDGE | {"mappings": {"plant.yaml": mapping}})
    assert noted(BRIDGE) != noted(BRIDGE | {"config": {"drain_timeout_secs": 1}})


def test_what_monitoring_gets_is_what_stands_in_the_repository(tmp_path: Path) -> None:
    found = rendered(BRIDGE, tmp_path)
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    assert of_kind(found, "PrometheusRule")["spec"] == alerts
    shown = of_kind(found, "ConfigMap", "edge-gateway-dashboard")["data"]["gateway.json"]
    assert json.loads(shown) == json.loads((DEPLOY / "grafana" / "gateway.json").read_text())
    monitor, pods = of_kind(found, "ServiceMonitor"), of_kind(found, "Service", "edge-gateway-pods")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in pods["spec"]["ports"]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"listeners": {"mqtt": {"protocol": "mqtt", "port": "1883"}}}},
        {"config": {"listeners": {"mqtt": {"protocol": "mqt", "port": 1883}}}},
        {"config": {"mappings": ["own.yaml"]}},
        {"mappings": {"plant.txt": {"version": 1}}},
        {"replica": 3},
        {"service": {"type": "Loadbalancer"}},
        {"persistence": {"size": "much"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(wrong))
    said = tool("helm", "lint", CHART, "-f", tmp_path / "values.yaml", succeeds=False)
    assert "schema" in said, said


def test_helm_finds_nothing_to_say() -> None:
    assert "[WARNING]" not in tool("helm", "lint", "--strict", CHART)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
