"""What uvicorn serves to clients that hang up: the views of docs/howto/costs.md, with a model that never ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from tests.support.snippets import ROOT, snippet

#: How often the model was called, and how many words it has returned.
counts = {"asked": 0, "said": 0}


async def ask_model(prompt: str, max_tokens: int) -> tuple[str, int]:
    """A model that never answers."""
    counts["asked"] += 1
    await asyncio.Event().wait()
    raise AssertionError


async def ask_words(prompt: str, max_tokens: int) -> AsyncIterator[str]:
    """A model that returns five words and then hangs."""
    counts["asked"] += 1
    for _ in range(5):
        counts["said"] += 1
        yield "word "
    await asyncio.Event().wait()


def asked(request: HttpRequest) -> HttpResponse:
    return JsonResponse(counts)


def served() -> Any:
    """The application, for ``uvicorn --factory``."""
    from django.conf import settings
    from django.core.asgi import get_asgi_application

    application = get_asgi_application()
    settings.ROOT_URLCONF = __name__
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    page: dict[str, Any] = {"__name__": "aviews"}
    exec(snippet(ROOT / "docs" / "howto" / "costs.md", "aviews.py"), page)
    page |= {"ask_model": ask_model, "ask_words": ask_words}
    urlpatterns[:] = [
        path("asked/", asked),
        path("complete/", page["complete"]),
        path("stream/", page["stream"]),
    ]
    return application


urlpatterns: list[Any] = []
