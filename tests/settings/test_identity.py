"""Back ends and users in the configuration: what is refused, where, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigurationError
from gateway.settings import load_settings, masked_yaml
from gateway.settings.users_file import read_users

TLS = "{cert_file: a, key_file: b, client_ca_file: c}"


@pytest.mark.parametrize(
    "text, told",
    [
        ("authentication: []", ":1:1: authentication: tuple should have at least 1 item"),
        ("authentication: [{}]", "authentication[0]: unable to extract tag using discriminator 'backend'"),
        ("authentication: [{backend: ldap}]", "'ldap' found using 'backend' does not match"),
        (
            "authentication: [{backend: jwt}]",
            ":1:18: authentication[0]: set exactly one of keys_file and keys_url",
        ),
        (
            "authentication:\n- backend: jwt\n  keys_fle: a",
            ":3:3: authentication[0].keys_fle: unknown key; did you mean 'keys_file'?",
        ),
        ("authentication: [{backend: http, user_url: x}]", "authentication[0].user_url: the URL must begin"),
        ("authentication: [{backend: users}, {backend: users}]", "users occurs twice"),
        ("users: {ann: {receive_messages_per_sec_max: 1}}", "users.ann: set one of password_hash"),
        (
            "users: {anonymous: {password_hash: x}}",
            "users.anonymous: clients without a name cannot have a password",
        ),
        (
            "listeners: {m: {protocol: mqtt, tls: {cert_file: a, key_file: b,"
            " client_certificate: optional}}}",
            "client_certificate needs client_ca_file",
        ),
    ],
)
def test_what_cannot_be_is_told_at_its_place(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        load_settings(file, {})
    assert told in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "users: {anonymous: {receive_messages_per_sec_max: 1}, guest: {receive_messages_per_sec_max: 1}}",
        "users: {ann: {receive_messages_per_sec_max: 1}}\n"
        f"listeners: {{m: {{protocol: mqtt, tls: {TLS}}}}}",
        "users: {ann: {receive_messages_per_sec_max: 1}}\n"
        "authentication: [{backend: users}, {backend: certificates}]",
    ],
)
def test_users_that_need_no_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    assert load_settings(file, {}).users


def test_passwords_in_addresses_are_masked() -> None:
    given = (
        "[{backend: http, user_url: 'https://us:secret@a/b'}, {backend: jwt, keys_url: 'https://u:secret@a'}]"
    )
    settings = load_settings(None, {"GATEWAY_AUTHENTICATION": given})
    assert len(settings.authentication) == 2
    assert "secret" not in masked_yaml(settings)


@pytest.mark.parametrize(
    "text, told",
    [
        ("- ann", ":1:1: a users file must be a table of user names"),
        ("ann:", ":1:1: ann: set one of password_hash"),
        ("ann: {}\n", ":1:1: ann: set one of password_hash"),
        ("ann: {password: secret}", ":1:7: ann.password: unknown key; did you mean"),
        ("ann: [secret]", ":1:1: ann: must be a table of keys"),
        ("ann: {password_hash: a, password_hash_file: secret}", ":1:1: ann: set one of password_hash"),
        (
            "anonymous: {password_hash: secret}",
            "users.anonymous: clients without a name cannot have a password",
        ),
    ],
)
def test_faults_of_a_file_of_users(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        read_users(file)
    assert told in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_of_users_may_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    file.write_text("# nobody yet\n")
    assert read_users(file).users == {}
