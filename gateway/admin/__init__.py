"""HTTP interface of the gateway: health, metrics, console, and the API for operators and programs.

Everything below /api needs a login or token (`admission.py`). Each part of the API lists its operations with
the functions that serve them (`operations.py`); `models.py` describes requests and responses; `rabbitmq.py`
implements RabbitMQ's management API. Browsers use the console, Prometheus the metrics, Kubernetes the health
probes.
"""

from gateway.admin.admission import Admission
from gateway.admin.clients import ClientsApi, ConnectedClient, ConnectionDetails
from gateway.admin.dead_letters import LettersApi
from gateway.admin.mappings import MappingsApi
from gateway.admin.namespaces import NamespacesApi
from gateway.admin.process import EndpointState, Limit, Process, ProcessApi
from gateway.admin.queues import ConsumerDetails, QueuesApi
from gateway.admin.rabbitmq import RabbitApi, RabbitListener
from gateway.admin.rabbitmq_changes import BrokerAccess
from gateway.admin.rates import RatesApi
from gateway.admin.readiness import Readiness
from gateway.admin.retained import RetainedApi
from gateway.admin.series import DetailedMetrics
from gateway.admin.server import AdminState, application, serve
from gateway.admin.sessions import SessionsApi

__all__ = [
    "AdminState",
    "Admission",
    "BrokerAccess",
    "ClientsApi",
    "ConnectedClient",
    "ConnectionDetails",
    "ConsumerDetails",
    "DetailedMetrics",
    "EndpointState",
    "LettersApi",
    "Limit",
    "MappingsApi",
    "NamespacesApi",
    "Process",
    "ProcessApi",
    "QueuesApi",
    "RabbitApi",
    "RabbitListener",
    "RatesApi",
    "Readiness",
    "RetainedApi",
    "SessionsApi",
    "application",
    "serve",
]
