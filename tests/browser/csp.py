"""The policy's header for Django 5.2, which has no middleware for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse


class ContentSecurityPolicyMiddleware:
    """Sends SECURE_CSP as Django 6.0 would, with a nonce that no template of Django 5.2 knows."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        policy = "; ".join(f"{name} {' '.join(sources)}" for name, sources in settings.SECURE_CSP.items())
        nonce = f"'nonce-{secrets.token_urlsafe(16)}'"
        response["Content-Security-Policy"] = policy.replace("<CSP_NONCE_SENTINEL>", nonce)
        return response
