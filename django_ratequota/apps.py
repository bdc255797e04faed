"""The app's configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from .runtime import Process


class RateQuotaConfig(AppConfig):
    """Registers system checks, records and publishes changes of policies, and fills ``runtime.process``."""

    name = "django_ratequota"
    verbose_name = _("Rate quotas")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, and connect the receivers of changes."""
        from .checks import register
        from .models.base import connect_receivers

        register()
        connect_receivers()

    def publish(self) -> int:
        """Publish a new revision of the policies, and return it; raises ``StoreError``."""
        from .runtime import default_limiter  # which setting up Django does not need

        return default_limiter().publish()

    def fill(self, process: Process) -> None:
        """Set the objects that check and record in this process, and connect its receivers.

        Called when ``process`` is first used, so that setting up Django imports none of it.
        """
        from .ledger.book import ledger
        from .monitoring import alerts, collector, request_log, workers
        from .policies import cache

        process.policies, process.record, process.observe = cache.policies, collector.collector.record, alerts.observe
        process.ledger = ledger
        request_log.connect()
        alerts.connect_receivers()
        if signals := sys.modules.get("celery.signals"):  # loaded in its workers
            # Their child processes end without Python's exit functions.
            signals.worker_process_shutdown.connect(workers.end)
        # Migrations and ``flush`` write policies that nobody records.
        post_migrate.connect(cache.policies.expire, sender=self, dispatch_uid="ratequota_after_migrate")
