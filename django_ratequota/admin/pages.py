"""Pages next to Django's own in the admin: one class per page, listed in ``pages`` of its model admin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from django import forms
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page
from django.db.models import Model
from django.http import Http404
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from ..conf import settings
from ..exceptions import StoreError
from .formatting import shown

Reply = TypeVar("Reply")


class AdminPage:
    """One page of a model admin, which makes its URL from ``path`` and ``name``.

    A subclass sets its name and writes ``view``. Operators without ``has_permission`` get 403, objects that they
    cannot see 404, and changes are recorded as the operator's.
    """

    #: Address below the model's list; "" = the name. With ``<path:object_id>``, ``view`` gets that object.
    path: ClassVar[str] = ""
    #: End of the URL's name: ``explain`` for ``admin:django_ratequota_ratepolicy_explain``.
    name: ClassVar[str]
    #: Styles and scripts of this page alone, besides those of the model admin.
    css: ClassVar[Sequence[str]] = ()
    js: ClassVar[Sequence[str]] = ()
    #: Text of the link to the page on the form of its object; "" = no link.
    link: ClassVar[Any] = ""

    def __init__(self, model_admin: ModelAdmin[Any]) -> None:
        self.admin: Any = model_admin
        self.site = model_admin.admin_site

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may open the page, of ``obj`` where it is about one object."""
        return bool(self.admin.has_view_permission(request, obj))

    def view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the response; ``args`` is the object where the page is about one."""
        raise NotImplementedError

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links, (address, text), that the form of ``obj`` has to this page."""
        return [(self.url(obj), self.link)] if self.link and self.has_permission(request, obj) else []

    def url(self, obj: Any = None, *, query: dict[str, str] | None = None) -> str:
        """Return the page's address."""
        ids = [] if obj is None else [quote(obj.pk)]
        return str(self.admin.page_url(self.name, *ids, query=query))

    def object_url(self, request: Any, model: type[Model], pk: Any, obj: Any = None) -> str:
        """Return the address of the object's change page; "" where the operator may not open it."""
        return model_url(self.site, model, "change", quote(pk)) if may_view(self.site, model, request, obj) else ""

    def known_parameters(self, request: Any, checks: Mapping[str, Callable[[str], Any]]) -> dict[str, str]:
        """Return the query's parameters that pass their check, "" for the others, and warn of those that do not."""
        found = dict.fromkeys(checks, "")
        for name, check in checks.items():
            value = request.GET.get(name, "")
            if value and check(value):
                found[name] = value
            elif value:
                text = _("%(name)s=%(value)s was ignored, because the value is unknown.")
                self.admin.message_user(request, text % {"name": name, "value": shown(value)[:60]}, messages.WARNING)
        return found

    def url_pattern(self) -> URLPattern:
        """Return the entry for ``ModelAdmin.get_urls``."""
        opts = self.admin.opts
        name = f"{opts.app_label}_{opts.model_name}_{self.name}"
        return path(self.path or f"{self.name}/", self.site.admin_view(self.dispatch), name=name)

    def dispatch(self, request: Any, object_id: str | None = None, **kwargs: Any) -> Any:
        """Check the permission, and run ``view`` with the changes recorded."""
        about = [] if object_id is None else [self.admin.get_object(request, unquote(object_id))]
        if not self.has_permission(request, *about):
            raise PermissionDenied
        if about == [None]:
            raise Http404
        return self.admin.run_recorded(self.view, request, *about, **kwargs)

    def render(self, request: Any, template: str, context: dict[str, Any], form: Any = None) -> TemplateResponse:
        """Return the page: ``template`` of the model's folder or of the app's, with what every admin page needs.

        ``context`` has the ``title``, and ``original`` (the end of the breadcrumbs) where this should differ.
        """
        request.current_app = self.site.name
        show_mode(self.admin, request)
        own = forms.Media(css={"all": self.css}, js=self.js)
        common = {
            **self.site.each_context(request),
            "original": str(context["title"]),  # django-unfold takes no lazy text
            "opts": self.admin.opts,
            "media": self.admin.media + own + (form.media if form else forms.Media()),
            "form": form,
            "has_view_permission": self.admin.has_view_permission(request),
        }
        folder = f"admin/{self.admin.opts.app_label}"
        templates = [f"{folder}/{self.admin.opts.model_name}/{template}", f"{folder}/{template}"]
        return TemplateResponse(request, templates, {**common, **context})


def is_id(text: str) -> bool:
    """Return whether the text may be the id of a policy or an endpoint."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def mode_text() -> str:
    """Return a sentence where limits are not enforced, or not counted in Redis; else ""."""
    if not settings.enabled:
        return _("Limits are not enforced, because RATEQUOTA['ENABLED'] is False.")
    if settings.in_memory:
        return _(
            "REDIS_URL is memory://, so each worker counts on its own. The counters shown here are those of one "
            "worker. Statistics, previews and reports need Redis."
        )
    return ""


def show_mode(model_admin: Any, request: Any) -> None:
    """Show ``mode_text`` as a message."""
    if request.method == "GET" and (text := mode_text()):
        model_admin.message_user(request, text, messages.WARNING, fail_silently=True)


def model_url(site: Any, model: Any, page: str, *args: Any, query: Mapping[str, Any] | None = None) -> str:
    """Return the address of a page of the model's admin: changelist, add, change, or a ``name`` of its ``pages``.

    "" where the site has no such page.
    """
    opts = model._meta
    try:
        url = reverse(f"{site.name}:{opts.app_label}_{opts.model_name}_{page}", args=args)
    except NoReverseMatch:
        return ""
    return f"{url}?{urlencode(query, doseq=True)}" if query else url


def page_numbers(page: Page[Any], url: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the numbers of a list's pages, each with its address, "" for an ellipsis; none if there is one page."""
    numbers = page.paginator.get_elided_page_range(page.number) if page.has_other_pages() else ()
    return [
        {"text": number, "current": number == page.number, "url": url(number) if isinstance(number, int) else ""}
        for number in numbers
    ]


def may_view(site: Any, model: Any, request: Any, obj: Any = None) -> bool:
    """Return whether the operator may open the model's list, or the page of ``obj``, on this site."""
    return bool(site.is_registered(model) and site.get_model_admin(model).has_view_permission(request, obj))


def reply(read: Callable[[], Reply]) -> tuple[Reply | None, str]:
    """Return what ``read`` returns and "", or None and the reason why Redis did not answer."""
    try:
        return read(), ""
    except StoreError as error:
        return None, error.reason


def unanswered(reason: str, then: Any = "") -> str:
    """Return in a sentence why there is no answer of Redis, followed by ``then`` where Redis is in use, but down."""
    if reason == "memory":
        return _("This needs Redis, but each worker counts in its own memory (memory://).")
    if reason == "disabled":
        return _("This needs Redis, which is unused while limits are not enforced.")
    text = _("Redis did not answer (%(reason)s).") % {"reason": reason}
    return f"{text} {then}".strip()
