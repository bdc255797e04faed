"""The example's admin: Django's own for users, with a link to what applies to each."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User

from django_ratequota.admin import QuotaLinkMixin

admin.site.unregister(User)


@admin.register(User)
class LinkedUserAdmin(QuotaLinkMixin, UserAdmin):  # type: ignore[type-arg]
    """Adds the link *Quota* to users' pages."""
