"""What was counted, kept for longer than Redis keeps it: requests by the hour, and units by calendar window."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..changes.databases import PrimaryQuerySet


class UsageCount(models.Model):
    """Requests of one hour in one series, written by ``ratequota rollup`` before Redis drops them."""

    starts_at = models.DateTimeField(_("starts at"), help_text=_("When the hour began."))
    place = models.CharField(
        _("place"),
        max_length=21,
        help_text=_("t = all requests, e7 = those at endpoint 7 (e0: at none), p7 = those that policy 7 applied to."),
    )
    admitted = models.PositiveBigIntegerField(_("admitted"), help_text=_("Requests that were let through."))
    refused = models.PositiveBigIntegerField(_("refused"), help_text=_("Requests that were refused."))
    would_refuse = models.PositiveBigIntegerField(
        _("would be refused"), help_text=_("Requests let through that a policy in log mode would have refused.")
    )

    objects = models.Manager.from_queryset(PrimaryQuerySet)()

    class Meta:
        verbose_name = _("usage count")
        verbose_name_plural = _("usage counts")
        ordering = ["-starts_at", "place"]
        constraints = [models.UniqueConstraint(fields=["starts_at", "place"], name="ratequota_usage_one_row")]

    def __str__(self) -> str:
        return f"{self.place} {self.starts_at:%Y-%m-%d %H:%M}"


class QuotaWindow(models.Model):
    """What one counter has used of one calendar window; written by ``monitoring.checkpoints``."""

    class Period(models.TextChoices):
        DAY = "day", _("day")
        WEEK = "week", _("week")
        MONTH = "month", _("month")

    counter = models.CharField(_("counter"), max_length=128, help_text=_("Its Redis key, without the prefix."))
    starts_at = models.DateTimeField(_("starts at"), help_text=_("When the window began."))
    ends_at = models.DateTimeField(_("ends at"), help_text=_("When the window ends."))
    period = models.CharField(_("period"), max_length=5, choices=Period.choices, help_text=_("Length of the window."))
    subject = models.CharField(
        _("subject"), max_length=200, db_index=True, help_text=_("Whom the counter belongs to.")
    )
    # Numbers, not foreign keys, because the row outlives the policy, and no deletion may search these rows.
    policy_id = models.BigIntegerField(_("policy"), null=True, help_text=_("The policy that limited it last."))
    endpoint_id = models.BigIntegerField(_("endpoint"), null=True, help_text=_("Empty = all endpoints."))
    rate = models.CharField(_("rate"), max_length=100, help_text=_("The rate that limited it last."))
    used = models.PositiveBigIntegerField(
        _("used"), help_text=_("Units, or requests where the rate counts requests, admitted and not given back.")
    )
    limit = models.PositiveBigIntegerField(_("limit"), help_text=_("The limit of that rate."))
    percent = models.PositiveBigIntegerField(_("percent"), help_text=_("Whole percent of the limit that is used."))
    at_us = models.BigIntegerField(_("at"), help_text=_("When that was so, by Redis' clock (µs since 1970)."))

    objects = models.Manager.from_queryset(PrimaryQuerySet)()

    class Meta:
        verbose_name = _("quota window")
        verbose_name_plural = _("quota windows")
        ordering = ["-starts_at", "counter"]
        constraints = [models.UniqueConstraint(fields=["counter", "starts_at"], name="ratequota_quota_one_row")]
        # The fullest of the windows that run now, also those of some policies or of an endpoint, without their rows.
        indexes = [
            models.Index(
                fields=["period", "ends_at", "percent", "policy_id", "endpoint_id"], name="ratequota_quota_fullest"
            )
        ]

    def __str__(self) -> str:
        return f"{self.counter} {self.starts_at:%Y-%m-%d}: {self.used} / {self.limit}"
