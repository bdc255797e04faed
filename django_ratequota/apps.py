"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class RateQuotaConfig(AppConfig):
    """Registers system checks and listens for policy changes."""

    name = "django_ratequota"
    verbose_name = _("Rate quotas")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks and connect the receivers."""
        from . import checks  # noqa: F401 - registers them
        from .models import receivers
        from .monitoring import alerts, request_log
        from .policies.after_migrate import publish_after_migrate

        receivers.connect()
        request_log.connect()
        alerts.connect_receivers()
        post_migrate.connect(publish_after_migrate, sender=self, dispatch_uid="ratequota_after_migrate")
