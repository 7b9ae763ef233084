"""Who a client is, and what that lets it do: one answer for all protocols and for HTTP.

It knows no connection and no queue; listeners and the HTTP server ask it.
"""
