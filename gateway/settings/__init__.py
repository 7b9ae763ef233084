"""Configuration of a gateway: one tree of strict, immutable sections.

`load_settings` reads it from a YAML file and the environment, `masked_yaml` shows it without secrets. Error
messages name the file, line, column and key. The package describes and checks options; it starts nothing.
"""

from gateway.settings.access import (
    AmqpPermissions,
    DefaultRoles,
    Destinations,
    FastPermissions,
    HttpAuthorizer,
    MqttRules,
    Role,
    TopicPermission,
)
from gateway.settings.amqp091 import AmqpLink, AmqpListener
from gateway.settings.amqpfast import FastLink, FastListener
from gateway.settings.audit import Audit
from gateway.settings.declare import Declare, DeclaredBinding, DeclaredExchange, DeclaredQueue, Origin
from gateway.settings.endpoints import (
    Admission,
    AnonymousListener,
    LinkSettings,
    LinkTls,
    LinkUrl,
    ListenerSettings,
    ListenerTls,
    SharedListener,
    masked_url,
    parse_url,
    secret_from,
    websocket_path,
)
from gateway.settings.limits import Limits
from gateway.settings.loader import load_settings
from gateway.settings.logins import LoginSettings
from gateway.settings.mqtt import MqttLink, MqttListener
from gateway.settings.sources import CONFIG_VARIABLE
from gateway.settings.tree import Http, HttpTls, LogSettings, Settings, StoreSettings, User, shipped_mappings
from gateway.settings.views import effective, json_schema, masked_yaml

__all__ = [
    "CONFIG_VARIABLE",
    "Admission",
    "AmqpLink",
    "AmqpListener",
    "AmqpPermissions",
    "AnonymousListener",
    "Audit",
    "Declare",
    "DeclaredBinding",
    "DeclaredExchange",
    "DeclaredQueue",
    "DefaultRoles",
    "Destinations",
    "FastLink",
    "FastListener",
    "FastPermissions",
    "Http",
    "HttpAuthorizer",
    "HttpTls",
    "Limits",
    "LinkSettings",
    "LinkTls",
    "LinkUrl",
    "ListenerSettings",
    "ListenerTls",
    "LogSettings",
    "LoginSettings",
    "MqttLink",
    "MqttListener",
    "MqttRules",
    "Origin",
    "Role",
    "Settings",
    "SharedListener",
    "StoreSettings",
    "TopicPermission",
    "User",
    "effective",
    "json_schema",
    "load_settings",
    "masked_url",
    "masked_yaml",
    "parse_url",
    "secret_from",
    "shipped_mappings",
    "websocket_path",
]
