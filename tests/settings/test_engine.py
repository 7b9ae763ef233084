"""What is said of the engine, and what it does not go with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.app.state import schema_of
from gateway.errors import ConfigurationError
from gateway.protocols import DIALECTS
from gateway.settings import load_settings
from gateway.settings.engine import EmbeddedEngine, RabbitEngine, StateDatabase

STATE = "postgresql: {url: 'postgresql://gateway@state/gateway'}"
RABBIT = f"broker: {{engine: rabbitmq, urls: ['amqp://gateway@one', 'amqp://gateway@two:5673'], {STATE}}}\n"


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return load_settings(path, {})


def test_the_embedded_broker_is_what_there_is_by_default(tmp_path: Path) -> None:
    settings = load_settings(None, {})
    assert settings.broker == EmbeddedEngine()
    assert sorted(settings.listeners) == ["amqp091", "amqpfast", "mqtt"]
    assert load(tmp_path, "broker: {engine: embedded}\n") == settings
    assert load(tmp_path, "broker: {}\n") == settings


def test_a_cluster_has_its_own_keys_and_serves_mqtt(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(RABBIT)
    settings = load_settings(path, {"GATEWAY_BROKER__NAMESPACE": "plant"})
    assert isinstance(settings.broker, RabbitEngine)
    assert settings.broker.namespace == "plant"
    assert settings.broker.addresses == ("one:5672", "two:5673")
    assert list(settings.listeners) == ["mqtt"]


@pytest.mark.parametrize(
    "text, why",
    [
        (f"broker: {{engine: rabbitmq, {STATE}}}\n", "broker: set url or urls"),
        (f"broker: {{engine: rabbitmq, urls: ['mqtt://one'], {STATE}}}\n", "begin with amqp://"),
        ("broker: {engine: rabbitmq, urls: ['amqp://one']}\n", "broker: needs 'postgresql'"),
        (RABBIT.replace("postgresql://", "mysql://"), "begins with postgresql://"),
        (RABBIT.replace("@state/gateway'", ":a@state/gateway', password_file: /dev/null"), "once"),
        ("broker: {engine: kafka}\n", "broker.engine: "),
        ("broker: {namespace: plant}\n", "broker.namespace: "),
        (RABBIT.replace("broker: {", "broker: {namespace: 'a b', "), "broker.namespace: "),
        (RABBIT.replace("broker: {", "broker: {replica: one, "), "broker.replica: "),
        (RABBIT + "listeners: {engine: {protocol: mqtt}}\n", "the endpoint name 'engine' is reserved"),
        (RABBIT + "declare: {queues: [{name: orders}]}\n", "declare needs the embedded broker"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(tmp_path: Path, text: str, why: str) -> None:
    yaml.safe_load(text)
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert why in str(caught.value)


def test_a_protocol_may_be_for_the_embedded_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RABBIT + "listeners: {a: {protocol: amqpfast}}\n"
    load(tmp_path, text)
    monkeypatch.setattr(type(DIALECTS["amqpfast"]), "on_engine", False)
    with pytest.raises(ConfigurationError, match=r"listeners\.a: protocol amqpfast needs the embedded"):
        load(tmp_path, text)


def test_clients_of_amqp_connect_to_the_cluster(tmp_path: Path) -> None:
    text = RABBIT + "listeners: {a: {protocol: amqp091, port: 5673}, m: {protocol: mqtt}}\n"
    with pytest.raises(ConfigurationError, match=r"listeners\.a: protocol amqp091 needs the embedded"):
        load(tmp_path, text)
    assert load(tmp_path, RABBIT).endpoints() == {"mqtt": "mqtt"}


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(RABBIT.replace("gateway@one", "gateway:secret@one"))
    assert "secret" not in load_settings(path, {}).model_dump_json()


def test_a_password_of_the_database_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(RABBIT.replace("gateway@state", "gateway:secret@state"))
    assert "secret" not in load_settings(path, {}).model_dump_json()


def test_a_password_of_the_database_is_read_each_time(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    database = StateDatabase(url="postgresql://gateway@state/gateway", password_file=secret)
    assert database.password() == "first"
    secret.write_text("second\n")
    assert database.password() == "second"


def test_a_schema_has_a_name_that_postgresql_accepts() -> None:
    assert schema_of("plant") == "plant"
    names = {schema_of("n" * 63 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= 40 for name in names)
