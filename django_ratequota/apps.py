"""The app's configuration."""

from __future__ import annotations

import sys
from importlib import import_module

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class RateQuotaConfig(AppConfig):
    """Fills ``runtime.process``, registers system checks, and connects receivers."""

    name = "django_ratequota"
    verbose_name = _("Rate quotas")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Set what decides and records in this process, register the checks and connect the receivers."""
        from . import checks  # noqa: F401 - registers them
        from .models import base
        from .monitoring import alerts, collector, ledger, request_log
        from .policies import cache
        from .runtime import process

        process.policies, process.record, process.observe = cache.policies, collector.collector.record, alerts.observe
        base.connect_receivers()
        request_log.connect()
        alerts.connect_receivers()
        if "celery" in sys.modules:  # its child processes end without Python's exit functions
            import_module("celery.signals").worker_process_shutdown.connect(lambda **_: ledger.end(), weak=False)
        # Migrations and ``flush`` write policies that nobody records.
        post_migrate.connect(cache.policies.expire, sender=self, dispatch_uid="ratequota_after_migrate")
