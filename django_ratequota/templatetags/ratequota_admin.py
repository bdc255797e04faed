"""Links from Django's own admin pages to this app's."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import template
from django.contrib.admin.sites import all_sites
from django.contrib.auth import get_user_model
from django.urls import reverse

register = template.Library()


@register.simple_tag(takes_context=True)
def ratequota_explain_url(context: Any, user: Any) -> str:
    """Return the link to Explain for the user; "" for operators who may not open it."""
    from ..models import RatePolicy

    request = context.get("request")
    name = getattr(request, "current_app", None)
    site = next((site for site in all_sites if site.name == name), None)
    if site is None or not site.is_registered(RatePolicy) or not isinstance(user, get_user_model()):
        return ""
    if user.pk is None or not site.get_model_admin(RatePolicy).has_view_permission(request):
        return ""
    page = reverse("admin:django_ratequota_ratepolicy_explain", current_app=name)
    return f"{page}?{urlencode({'user': user.pk})}"
