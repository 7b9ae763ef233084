"""What a browser, Prometheus and Kubernetes see over HTTP: health, metrics, status, and a live page.

It only reads; nothing in here changes what the gateway does.
"""

from gateway.admin.readiness import Readiness
from gateway.admin.server import AdminState, application, serve

__all__ = ["AdminState", "Readiness", "application", "serve"]
