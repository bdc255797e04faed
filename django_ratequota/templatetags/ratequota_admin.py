"""Tags of the operators' pages, and links to them from other pages of the admin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from django import template
from django.contrib.admin.sites import all_sites
from django.contrib.auth import get_user_model
from django.utils.html import format_html, format_html_join

from ..operations.texts import moment, number_text

register = template.Library()
register.filter("number", number_text)
register.filter("to_second", partial(moment, seconds=True))


@register.filter
def shown(text: Any) -> str:
    """``{{ row.reason|shown }}``: a text of unknown origin, short enough for a cell and harmless."""
    from ..admin import formatting

    return formatting.shown(text)


@register.filter
def clock(at: datetime) -> str:
    """``{{ refusal.at|clock }}``: a time to the second, with the date unless it is today's."""
    from ..admin import formatting

    return formatting.clock(at.timestamp())


@register.filter
def caller(subject: str, names: Mapping[str, str]) -> str:
    """``{{ refusal.caller|caller:names }}``: a subject with its name in ``caller_names``."""
    from ..admin.names import caller_text

    return caller_text(subject, names)


@register.filter
def limits(names: Iterable[str]) -> str:
    """``{{ refusal.limits|limits }}``: names of limits in a line."""
    from ..admin.names import limits_text

    return limits_text(names)


@register.simple_tag(takes_context=True)
def ratequota_explain_url(context: Any, user: Any) -> str:
    """Return the URL of the user's Explain page; "" for operators who may not open it."""
    site = _site(context.get("request"))
    if site is None or not isinstance(user, get_user_model()) or user.pk is None:
        return ""
    from ..admin.names import explain_url
    from ..admin.pages import may_view
    from ..models import RatePolicy

    return explain_url(site, f"user:{user.pk}") if may_view(site, RatePolicy, context["request"]) else ""


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
