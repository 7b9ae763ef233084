"""The Compose file: what it mounts is there, and the gateway takes the configuration and bridges by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway import __version__
from gateway.cli.checks import run_checks
from gateway.mapping.linter import Severity
from gateway.settings import parse_url
from tests.deploy.programs import DEPLOY, tool

FILE: Final = DEPLOY / "docker-compose.yaml"
FOLDER: Final = DEPLOY / "compose"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]


def mounts(service: str) -> dict[str, str]:
    """Sources by their places in the container."""
    parts = [one.split(":") for one in SERVICES[service]["volumes"]]
    return {place: source for source, place, *_ in parts}


def test_what_is_mounted_is_there() -> None:
    sources = [source for service in SERVICES for source in mounts(service).values()]
    files = {source for source in sources if source.startswith(".")}
    paths = {(DEPLOY / source).resolve() for source in files}
    assert {path for path in paths if path.parent == FOLDER} == set(FOLDER.iterdir())
    assert all(path.is_file() for path in paths)
    assert {source for source in sources if source not in files} == set(COMPOSE["volumes"])


def test_the_gateway_takes_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = mounts("gateway")
    command = SERVICES["gateway"]["command"]
    assert command[-1] in places
    for place, source in places.items():
        if source.startswith("."):
            text = (DEPLOY / source).read_text().replace("/etc/gateway/", f"{tmp_path}/")
            (tmp_path / Path(place).name).write_text(text)
    for name in SERVICES["gateway"]["environment"]:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("GATEWAY_STORE__PATH", str(tmp_path / "store"))
    result = run_checks(tmp_path / "gateway.yaml", connect=False)
    assert [one for one in result.findings if one.severity is not Severity.NOTE] == []
    settings = result.settings
    assert settings is not None
    assert not settings.listeners
    password = settings.links["erp"].password
    assert password is not None
    assert password.get_secret_value() == "secret"
    hosts = {parse_url(url).host for one in settings.links.values() for url in one.all_urls}
    assert hosts == {"mosquitto", "rabbitmq"}


def test_brokers_and_gateway_fit_together() -> None:
    rabbitmq, gateway = SERVICES["rabbitmq"]["environment"], SERVICES["gateway"]["environment"]
    assert rabbitmq["RABBITMQ_DEFAULT_PASS"] == gateway["GATEWAY_LINKS__ERP__PASSWORD"]
    assert SERVICES["gateway"]["image"] == f"gateway:{__version__}"
    waits = SERVICES["gateway"]["depends_on"]
    assert waits == {name: {"condition": "service_healthy"} for name in ("mosquitto", "rabbitmq")}
    assert all("healthcheck" in SERVICES[name] for name in waits)
    conf = dict(
        line.split(maxsplit=1)
        for line in (FOLDER / "mosquitto.conf").read_text().splitlines()
        if line[:1] not in "#"
    )
    assert conf["listener"] == "1883"


def test_prometheus_scrapes_the_gateway_and_grafana_reads_it(tmp_path: Path) -> None:
    places = mounts("prometheus")
    text = (DEPLOY / places["/etc/prometheus/prometheus.yml"]).read_text()
    scraped = yaml.safe_load(text)
    (job,) = scraped["scrape_configs"]
    assert job["job_name"] == "gateway", "the alerts name the job"
    port = SERVICES["gateway"]["ports"][0].rpartition(":")[2]
    assert job["static_configs"] == [{"targets": [f"gateway:{port}"]}]
    assert set(scraped["rule_files"]) <= set(places)
    file = tmp_path / "prometheus.yaml"
    file.write_text(text.replace("/etc/prometheus/", f"{DEPLOY}/prometheus/"))
    tool("promtool", "check", "config", file)
    mounted = mounts("grafana")
    provisioning = "/etc/grafana/provisioning"
    source = yaml.safe_load((DEPLOY / mounted[f"{provisioning}/datasources/gateway.yaml"]).read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / mounted[f"{provisioning}/dashboards/gateway.yaml"]).read_text())
    folder = provider["providers"][0]["options"]["path"]
    dashboard = json.loads((DEPLOY / mounted[f"{folder}/gateway.json"]).read_text())
    kinds = [one["type"] for one in dashboard["templating"]["list"]]
    assert "datasource" in kinds, "an import would ask for it, a provisioned dashboard cannot"


def test_nothing_is_open_beyond_this_machine_and_the_gateway_has_few_rights() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    gateway = SERVICES["gateway"]
    assert gateway["read_only"] is True
    assert gateway["cap_drop"] == ["ALL"]
    assert gateway["ulimits"]["core"] == 0
