"""The admin, with the link from users to Explain."""

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.urls import path

from django_ratequota.admin import QuotaLinkMixin

admin.site.unregister(User)


@admin.register(User)
class LinkedUserAdmin(QuotaLinkMixin, UserAdmin):  # type: ignore[type-arg]
    """Django's own, with the link."""


urlpatterns = [path("admin/", admin.site.urls)]
