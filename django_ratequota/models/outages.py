"""The times in which Redis gave no decisions."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..changes.databases import PrimaryQuerySet


class Outage(models.Model):
    """A time in which one worker got no decisions from Redis, and what ``on_error`` made of its requests.

    Its worker writes all of the row each time (``monitoring.outages``). Several workers' rows are joined when they
    are read (``operations.outages``).
    """

    id = models.UUIDField(_("outage"), primary_key=True, help_text=_("Drawn at random by the worker."))
    worker = models.CharField(_("worker"), max_length=80, help_text=_("Host and process id."))
    began_at = models.DateTimeField(_("began at"), help_text=_("When it first decided without Redis."))
    ended_at = models.DateTimeField(
        _("ended at"), db_index=True, help_text=_("When it last decided without Redis, or still left it alone.")
    )
    reason = models.CharField(_("reason"), max_length=50, help_text=_("Why Redis did not decide, such as timeout."))
    allow = models.PositiveBigIntegerField(_("admitted without limits"), help_text=_("Requests."))
    deny = models.PositiveBigIntegerField(_("refused"), help_text=_("Requests that a policy's “on error” refused."))
    local = models.PositiveBigIntegerField(
        _("decided by the worker"), help_text=_("Requests that it counted by itself; it may have refused some.")
    )
    policies = models.JSONField(
        _("policies"), help_text=_("Policy id to its “on error” to the number of requests that it decided.")
    )

    objects = models.Manager.from_queryset(PrimaryQuerySet)()

    class Meta:
        verbose_name = _("outage")
        verbose_name_plural = _("outages")
        ordering = ["-began_at"]
        default_permissions = ()
        # As for ``PolicyChange``.
        required_db_features = ["supports_json_field"]

    def __str__(self) -> str:
        return f"{self.worker} {self.began_at:%Y-%m-%d %H:%M}: {self.reason}"
