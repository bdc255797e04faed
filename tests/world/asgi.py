"""The ASGI application, for servers that take no factory."""

from .site import asgi

application = asgi()
