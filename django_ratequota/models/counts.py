"""What is kept for longer than in Redis: requests by the hour, units by calendar window, and Redis' own outages."""

from __future__ import annotations

from django.db import models
from django.db.models import F
from django.db.models.functions import Mod
from django.utils.translation import gettext_lazy as _

from .base import UnrecordedModel
from .fields import CountedField, ExactField


class UsageCount(UnrecordedModel):
    """Requests of one hour in one series, written by ``ratequota rollup`` before Redis drops them."""

    starts_at = models.DateTimeField(_("starts at"), help_text=_("Start of the hour."))
    place = models.CharField(
        _("place"),
        max_length=21,
        help_text=_("t = all requests, e7 = requests to endpoint 7 (e0 = to none), p7 = requests under policy 7."),
    )
    admitted = models.PositiveBigIntegerField(_("admitted"), help_text=_("Requests that were admitted."))
    refused = models.PositiveBigIntegerField(_("refused"), help_text=_("Requests that were refused."))
    would_refuse = models.PositiveBigIntegerField(
        _("log only"), help_text=_("Admitted requests that a log only policy would have refused.")
    )

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("usage count")
        verbose_name_plural = _("usage counts")
        ordering = ["-starts_at", "place"]
        constraints = [models.UniqueConstraint(fields=["starts_at", "place"], name="ratequota_usage_one_row")]

    def __str__(self) -> str:
        return f"{self.place} {self.starts_at:%Y-%m-%d %H:%M}"


class QuotaWindow(UnrecordedModel):
    """The units that one counter has charged and refunded in one window; both only grow (``ledger``).

    They are of requests that have ended. Redis has those that are held by running ones as well.
    """

    class Period(models.TextChoices):
        DAY = "day", _("day")
        WEEK = "week", _("week")
        MONTH = "month", _("month")

    counter = ExactField(_("counter"), max_length=128, help_text=_("Redis key without the prefix and the day."))
    first_day = models.DateField(_("first day"), help_text=_("The day in TIME_ZONE on which the window began."))
    charged = models.BigIntegerField(
        _("charged"), help_text=_("Admitted units, or requests if the rate is in requests.")
    )
    refunded = models.BigIntegerField(_("refunded"), help_text=_("Charged units or requests that were refunded."))
    held = models.BigIntegerField(
        _("held"), default=0, help_text=_("Units of requests that run. They are charged or refunded when these end.")
    )
    used = models.GeneratedField(
        expression=F("charged") - F("refunded"),
        output_field=models.BigIntegerField(),
        db_persist=True,
        verbose_name=_("used"),
        help_text=_("Charged minus refunded units or requests."),
    )
    # Exact, as MariaDB divides to a decimal.
    percent = models.GeneratedField(
        expression=((F("charged") - F("refunded")) * 100 - Mod((F("charged") - F("refunded")) * 100, F("limit")))
        / F("limit"),
        output_field=models.BigIntegerField(),
        db_persist=True,
        verbose_name=_("percent"),
        help_text=_("Used part of the limit in whole percent."),
    )
    mixed = models.BooleanField(
        _("mixed"),
        default=False,
        help_text=_(
            "Whether several policies or rates have limited the counter. The days show the charges under each."
        ),
    )
    notified = models.TextField(
        _("notified"), blank=True, help_text=_("Levels in percent that were notified, by limit, as JSON.")
    )
    # The fields below are from the latest sum; policy, rate and limit are those of the latest check.
    starts_at = models.DateTimeField(_("starts at"), help_text=_("Start of the window."))
    ends_at = models.DateTimeField(_("ends at"), help_text=_("End of the window."))
    period = models.CharField(_("period"), max_length=5, choices=Period.choices, help_text=_("Length of the window."))
    subject = CountedField(_("subject"), max_length=200, db_index=True, help_text=_("The subject of the counter."))
    # Numbers, not foreign keys, because the row outlives the policy, and no deletion may search these rows.
    policy_id = models.BigIntegerField(
        _("policy"), null=True, help_text=_("The last policy that limited the counter.")
    )
    endpoint_id = models.BigIntegerField(_("endpoint"), null=True, help_text=_("Empty = all endpoints."))
    rate = models.CharField(_("rate"), max_length=100, help_text=_("The last rate that limited the counter."))
    limit = models.PositiveBigIntegerField(_("limit"), help_text=_("The limit of that rate."))
    limited_us = models.BigIntegerField(
        _("limited at"), default=0, help_text=_("Time of the check with that rate in microseconds since 1970.")
    )
    written_at = models.DateTimeField(_("written at"), help_text=_("Time of the latest update."))

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("quota window")
        verbose_name_plural = _("quota windows")
        ordering = ["-first_day", "counter"]
        constraints = [models.UniqueConstraint(fields=["counter", "first_day"], name="ratequota_quota_one_row")]
        # The fullest of the windows that run now, also those of some policies or of an endpoint, without their rows.
        indexes = [
            models.Index(
                fields=["period", "ends_at", "percent", "policy_id", "endpoint_id", "mixed"],
                name="ratequota_quota_fullest",
            )
        ]

    def __str__(self) -> str:
        return f"{self.counter} {self.first_day}: {self.used} / {self.limit}"


class QuotaDay(UnrecordedModel):
    """The units that one day added to a month in ``QuotaWindow``, by policy and rate; kept for KEEP_QUOTA_DAYS.

    Those of a month under several policies or rates are kept as long as the month, for the lines of its invoice.
    """

    counter = ExactField(_("counter"), max_length=128, help_text=_("The same as in the quota window."))
    first_day = models.DateField(_("first day"), help_text=_("The same as in the quota window."))
    day = models.DateField(_("day"), help_text=_("The day in TIME_ZONE."))
    policy_id = models.BigIntegerField(_("policy"), help_text=_("The policy that limited the counter. 0 = none."))
    charged = models.BigIntegerField(_("charged"), help_text=_("Units or requests that were admitted on that day."))
    refunded = models.BigIntegerField(_("refunded"), help_text=_("Units or requests that were refunded on that day."))
    rate = models.CharField(_("rate"), max_length=100, help_text=_("The policy's rate at that time."))

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("quota day")
        verbose_name_plural = _("quota days")
        ordering = ["day", "counter"]
        # By the day first: the rollup deletes by it, and what is written now is together.
        constraints = [
            models.UniqueConstraint(
                fields=["day", "counter", "first_day", "policy_id", "rate"], name="ratequota_day_one_row"
            )
        ]
        # For the days of some windows.
        indexes = [models.Index(fields=["counter", "first_day"], name="ratequota_day_of_window")]

    def __str__(self) -> str:
        return f"{self.counter} {self.day}: {self.charged - self.refunded}"


class LedgerWriter(UnrecordedModel):
    """A process that adds to the ledger, and how many of its batches are in it: each is added exactly once.

    If it is silent for ten minutes while it holds units, it was killed, and these are refunded.
    """

    id = models.UUIDField(_("writer"), primary_key=True, help_text=_("A random id of the worker."))
    batches = models.PositiveBigIntegerField(_("batches"), help_text=_("Number of batches in the ledger."))
    written_at = models.DateTimeField(_("written at"), help_text=_("Time at which the last batch was added."))
    held = models.TextField(
        _("held"), blank=True, help_text=_("Units of the worker's running requests by quota window, as JSON.")
    )

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("ledger writer")
        verbose_name_plural = _("ledger writers")

    def __str__(self) -> str:
        return f"{self.id}: {self.batches}"


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
