"""HTTP/1.1 for an ASGI application, on h11 and Trio, where no connection can harm another.

A connection is a task of its own behind a guard; whatever its peer can make it wait for has a deadline.
"""

from gateway.admin.http.server import HttpServer

__all__ = ["HttpServer"]
