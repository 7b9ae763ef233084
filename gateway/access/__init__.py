"""Authentication and authorization of clients, the same for all protocols and for HTTP.

This package does not know connections or queues; listeners and the HTTP server call it.
"""
