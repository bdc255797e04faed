"""Tags of the operators' pages, and links to them from other pages of the admin."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import template
from django.contrib.admin.sites import all_sites
from django.contrib.auth import get_user_model
from django.urls import reverse
from django.utils.html import format_html, format_html_join

register = template.Library()


@register.simple_tag(takes_context=True)
def ratequota_explain_url(context: Any, user: Any) -> str:
    """Return the URL of the user's Explain page; "" for operators who may not open it."""
    from ..models import RatePolicy

    request = context.get("request")
    site = _site(request)
    if site is None or not site.is_registered(RatePolicy) or not isinstance(user, get_user_model()):
        return ""
    if user.pk is None or not site.get_model_admin(RatePolicy).has_view_permission(request):
        return ""
    page = reverse("admin:django_ratequota_ratepolicy_explain", current_app=site.name)
    return f"{page}?{urlencode({'user': user.pk})}"


@register.inclusion_tag("admin/django_ratequota/home.html", takes_context=True)
def ratequota_home(context: Any) -> dict[str, Any]:
    """Show the operators' home: status, refusals of the last hour, changes of the last day."""
    from ..admin.home import home

    site = _site(context["request"])
    return {} if site is None else home(site, context["request"])


@register.inclusion_tag("admin/django_ratequota/tools.html", takes_context=True)
def ratequota_tools(context: Any) -> dict[str, Any]:
    """Show the tool bar, but in no popup."""
    from ..admin.tools import tools

    site = _site(context["request"])
    return {} if site is None or context.get("is_popup") else {"tools": tools(site, context["request"])}


@register.simple_block_tag(end_name="endtable")
def table(content: Any, label: Any, *heads: Any, css: str = "") -> str:
    """Return a table of the rows in ``content``, without empty heads; a wide one scrolls, and not the page.

    ``label`` names it for screen readers, and ``css`` is its class.
    """
    return format_html(
        '<div class="ratequota-scroll" tabindex="0" role="region" aria-label="{}">'
        '<table class="{}"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>',
        label,
        css,
        format_html_join("", '<th scope="col">{}</th>', ([head] for head in heads if head)),
        content,
    )


def _site(request: Any) -> Any:
    """Return the admin site of the page; None outside the admin."""
    name = getattr(request, "current_app", None)
    return next((site for site in all_sites if site.name == name), None)
