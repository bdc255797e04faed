"""The WSGI application, for servers that take no factory."""

from .site import wsgi

application = wsgi()
