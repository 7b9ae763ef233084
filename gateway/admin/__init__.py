"""What a browser, Prometheus and Kubernetes see over HTTP: health, metrics, status, a console; and the
interface by which operators and programs look at everything, and change it.

Whatever is below /api needs admission (admission.py). Each of its parts says what can be asked of it in rows
(operations.py), and models.py what the answers are made of; rabbitmq.py speaks as RabbitMQ's management does.
"""

from gateway.admin.admission import Admission
from gateway.admin.clients import ClientsApi, Connected, Details
from gateway.admin.dead_letters import LettersApi
from gateway.admin.mappings import MappingsApi
from gateway.admin.namespaces import NamespacesApi
from gateway.admin.process import Limit, Process, ProcessApi, State
from gateway.admin.queues import QueuesApi
from gateway.admin.rabbitmq import Consuming, Door, RabbitApi
from gateway.admin.rabbitmq_changes import Broker
from gateway.admin.rates import RatesApi
from gateway.admin.readiness import Readiness
from gateway.admin.retained import RetainedApi
from gateway.admin.series import DetailedMetrics
from gateway.admin.server import AdminState, application, serve
from gateway.admin.sessions import SessionsApi

__all__ = [
    "AdminState",
    "Admission",
    "Broker",
    "ClientsApi",
    "Connected",
    "Consuming",
    "DetailedMetrics",
    "Details",
    "Door",
    "LettersApi",
    "Limit",
    "MappingsApi",
    "NamespacesApi",
    "Process",
    "ProcessApi",
    "QueuesApi",
    "RabbitApi",
    "RatesApi",
    "Readiness",
    "RetainedApi",
    "SessionsApi",
    "State",
    "application",
    "serve",
]
