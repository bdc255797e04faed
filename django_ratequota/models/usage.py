"""Usage counts, kept for longer than Redis keeps them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..recording.databases import PrimaryQuerySet


class UsageCount(models.Model):
    """Requests of one hour or day in one series, written by ``ratequota rollup`` before Redis drops them."""

    class Length(models.TextChoices):
        HOUR = "hour", _("hour")
        DAY = "day", _("day")

    length = models.CharField(_("length"), max_length=4, choices=Length.choices, help_text=_("Of the time counted."))
    starts_at = models.DateTimeField(_("starts at"), help_text=_("When the hour or day began."))
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
        constraints = [
            models.UniqueConstraint(fields=["length", "starts_at", "place"], name="ratequota_usage_one_row")
        ]

    def __str__(self) -> str:
        return f"{self.place} {self.starts_at:%Y-%m-%d %H:%M}"
