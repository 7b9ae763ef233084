"""HTTP/1.1 server for an ASGI application on h11 and Trio, in which no connection can harm another.

Each connection is a task of its own, whose errors end only this connection. Every wait for a client has a
deadline.
"""

from gateway.admin.http.server import HttpServer

__all__ = ["HttpServer"]
