"""The times in which Redis gave no decisions."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .base import UnrecordedModel


class Outage(UnrecordedModel):
    """A time in which one worker got no decisions from Redis, and what ``on_error`` made of its requests.

    Its worker writes all of the row each time (``monitoring.outages``). Several workers' rows are joined when they
    are read (``operations.outages``).
    """

    id = models.UUIDField(_("outage"), primary_key=True, help_text=_("A random id of the worker."))
    worker = models.CharField(_("worker"), max_length=80, help_text=_("Host and process id."))
    began_at = models.DateTimeField(_("began at"), help_text=_("Time of the worker's first decision without Redis."))
    ended_at = models.DateTimeField(
        _("ended at"), db_index=True, help_text=_("Last time at which the worker was without Redis.")
    )
    reason = models.CharField(_("reason"), max_length=50, help_text=_("Reason for the outage, such as timeout."))
    allow = models.PositiveBigIntegerField(
        _("admitted without limits"), help_text=_("Requests that were admitted without limits.")
    )
    deny = models.PositiveBigIntegerField(
        _("refused"), help_text=_("Requests that the “on error” of a policy refused.")
    )
    local = models.PositiveBigIntegerField(
        _("decided by the worker"),
        help_text=_("Requests that the worker counted by itself. Some of them may have been refused."),
    )
    policies = models.JSONField(_("policies"), help_text=_("Number of requests by policy id and “on error”."))

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("outage")
        verbose_name_plural = _("outages")
        ordering = ["-began_at"]
        # As for ``PolicyChange``.
        required_db_features = ["supports_json_field"]

    def __str__(self) -> str:
        return f"{self.worker} {self.began_at:%Y-%m-%d %H:%M}: {self.reason}"
