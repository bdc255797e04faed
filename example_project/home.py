"""The demo's page at ``/``: its script sends requests to the API. A project needs nothing of this."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.views import LoginView
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.decorators import method_decorator

from django_ratequota.decorators import ratequota

from .check import basic
from .seed import PASSWORD, USERS
from .settings import BASE_DIR

#: Nothing inline and nothing from elsewhere, as a strict project would demand of the page.
_CONTENT_SECURITY_POLICY = "default-src 'none'; " + "; ".join(
    f"{name} 'self'" for name in ("script-src", "style-src", "connect-src", "img-src", "form-action", "base-uri")
)
#: Method, path, and what is special about the endpoint.
REQUESTS = [
    ("reports", "GET", "/api/reports/", "A REST framework view without a scope: its route matches the endpoint."),
    ("search", "GET", "/api/search/?q=report", "Costs 5 units a request."),
    ("exports", "GET", "/api/exports/", "The Free plan has 3 an hour. Enterprise is unlimited."),
    ("completions", "GET", "/api/completions/", "A stream: reserves 20 units, then pays one for each word sent."),
    ("status", "GET", "/api/status/", "A plain view: it knows no API passwords, so it counts per address."),
    ("login", "POST", "/api/login/", "A wrong password. Counted per address, as guessers are anonymous."),
]


@method_decorator(ratequota(scope="login"), name="post")
class Home(LoginView):
    """The page, and its buttons to sign in, which are limited like every other login."""

    template_name = "example_project/home.html"
    next_page = "home"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        callers = [(name, plan, basic(name, PASSWORD)) for name, plan in USERS.items()]
        return super().get_context_data(**kwargs, callers=callers, password=PASSWORD, requests=REQUESTS)

    def render_to_response(self, context: dict[str, Any], **kwargs: Any) -> Any:
        return super().render_to_response(
            context, headers={"Content-Security-Policy": _CONTENT_SECURITY_POLICY}, **kwargs
        )


def documentation(request: HttpRequest, name: str) -> HttpResponse:
    """Show a page of the documentation as it is written, because the demo needs no network."""
    docs = BASE_DIR / "docs"
    pages = {page.relative_to(docs).with_suffix("").as_posix(): page for page in docs.rglob("*.md")}
    if name not in pages:
        raise Http404
    return HttpResponse(pages[name].read_text("utf-8"), content_type="text/plain; charset=utf-8")
