"""What a browser, Prometheus and Kubernetes see over HTTP: health, metrics, status, and a live page.

Whatever changes something needs admission (admission.py); the rest only reads.
"""

from gateway.admin.admission import Admission
from gateway.admin.clients import ClientsApi, Connected
from gateway.admin.dead_letters import LettersApi
from gateway.admin.queues import QueuesApi
from gateway.admin.readiness import Readiness
from gateway.admin.retained import RetainedApi
from gateway.admin.server import AdminState, application, serve
from gateway.admin.sessions import SessionsApi

__all__ = [
    "AdminState",
    "Admission",
    "ClientsApi",
    "Connected",
    "LettersApi",
    "QueuesApi",
    "Readiness",
    "RetainedApi",
    "SessionsApi",
    "application",
    "serve",
]
