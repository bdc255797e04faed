"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RateQuotaConfig(AppConfig):
    """Registers system checks and listens for policy changes."""

    name = "django_ratequota"
    verbose_name = _("Rate quotas")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect the receivers and register the checks."""
        from . import checks, signals

        checks.connect()
        signals.connect()
