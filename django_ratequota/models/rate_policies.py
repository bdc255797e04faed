"""Rate policies: an audience, an endpoint (or all endpoints) and rates."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Case, CharField, F, Q, Value, When
from django.db.models.functions import Cast, Coalesce
from django.utils.translation import gettext_lazy as _

from ..changes.validators import check_dates, visible
from ..conf import COUNTED_PER, settings
from ..engine.rates import ALGORITHMS, DEFAULT_ALGORITHM, MAX_TEXT
from .audiences import Plan, SubjectList
from .base import TrackedModel
from .endpoints import Endpoint
from .fields import RatesField, SubjectField, optional_reference, optional_time, optional_user, reason


class RatePolicy(TrackedModel):
    """Who × what → rates: an audience, an endpoint, and how much."""

    class Mode(models.TextChoices):
        ENFORCE = "enforce", _("enforce")
        LOG = "log", _("log only")
        OFF = "off", _("off")

    class OnError(models.TextChoices):
        SETTING = "", _("use the setting ON_ERROR")
        ALLOW = "allow", _("allow")
        DENY = "deny", _("deny (503)")
        LOCAL = "local", _("count in each worker")

    endpoint = optional_reference(
        Endpoint,
        _("endpoint"),
        related_name="policies",
        help_text=_("The endpoint to limit. Empty = all endpoints together."),
    )
    user = optional_user(
        "ratequota_policies",
        _("An override for this user. It replaces the policies for the plan and for everyone on this endpoint."),
        models.CASCADE,
    )
    subject = SubjectField(
        _("subject"),
        max_length=200,
        blank=True,
        default="",
        help_text=_(
            "An override for one subject, written kind:value, such as tenant:acme or ip:203.0.113.7, or for a "
            "network such as ip:203.0.113.0/24. The longest prefix wins."
        ),
    )
    subject_list = optional_reference(
        SubjectList,
        _("subject list"),
        related_name="policies",
        help_text=_("All members of this list: users, subjects and networks."),
    )
    plan = optional_reference(
        Plan,
        _("plan"),
        related_name="policies",
        help_text=_("Customers on this plan. Without a user, subject, list and plan, the policy is for everyone."),
    )
    counted_per = models.CharField(
        _("counted per"),
        max_length=50,
        default="caller",
        help_text=_(
            "Clients that share one counter: caller (each user, or each IP address if anonymous), ip, plan, everyone "
            "or an identifier."
        ),
    )
    rates = RatesField(
        _("rates"),
        max_length=MAX_TEXT,
        help_text=_(
            "Rates separated by commas, such as 10/s, 1000/hour burst 50, 100000/month. Or enter unlimited or "
            "blocked. A request must pass all rates. 60 requests/min counts each request once regardless of its cost."
        ),
    )
    algorithm = models.CharField(
        _("algorithm"),
        max_length=30,
        default=DEFAULT_ALGORITHM,
        choices=[(name, name.replace("_", " ")) for name in ALGORITHMS],
        help_text=_("Algorithm of rates that do not specify one. A month is always a calendar window."),
    )
    mode = models.CharField(
        _("mode"),
        max_length=10,
        default=Mode.ENFORCE,
        choices=Mode.choices,
        help_text=_(
            "“enforce” refuses requests above the limit. “log only” counts up to the limit without refusing any. "
            "“off” ignores the policy."
        ),
    )
    on_error = models.CharField(
        _("on error"),
        max_length=10,
        blank=True,
        default="",
        choices=OnError.choices,
        help_text=_("Treatment of requests while Redis does not answer."),
    )
    durable = models.BooleanField(
        _("keep in database"),
        null=True,
        blank=True,
        choices=[(None, _("for verified clients")), (True, _("yes")), (False, _("no"))],
        help_text=_(
            "Keep the usage of calendar days, weeks and months in the database as well, in case Redis loses it. "
            "“yes” includes addresses, typed names and unchecked keys, each of which takes a row per period."
        ),
    )
    leads_headers = models.BooleanField(
        _("first in headers"),
        default=False,
        help_text=_("Describe this policy's first rate in X-RateLimit-* instead of the limit with the least room."),
    )
    starts_at = optional_time(_("starts at"), _("The policy applies from this moment on. Empty = at once."))
    ends_at = optional_time(_("ends at"), _("The policy applies until this moment. Empty = open-ended."))
    reason = reason()

    class Meta(TrackedModel.Meta):
        verbose_name = _("rate policy")
        verbose_name_plural = _("rate policies")
        ordering = ["endpoint__name", "plan__position", "plan__name", "pk"]
        # Enforced by admin/permissions.py.
        permissions = [
            ("reset_usage", "Can reset what was counted"),
            ("grant_override", "Can grant overrides to users and subjects"),
            ("block_callers", "Can block callers"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(user__isnull=True, subject="", subject_list__isnull=True)
                | Q(user__isnull=True, subject="", plan__isnull=True)
                | Q(user__isnull=True, subject_list__isnull=True, plan__isnull=True)
                | Q(subject="", subject_list__isnull=True, plan__isnull=True),
                name="ratequota_policy_one_audience",
                violation_error_message=_(
                    "Choose only one audience (user, subject, list or plan). Leave the others empty."
                ),
            ),
            # Coalesced, because plain unique constraints treat NULLs as different on SQLite and old PostgreSQL.
            models.UniqueConstraint(
                Coalesce(F("endpoint"), Value(0)),
                Coalesce(Cast(F("user"), CharField()), Value("")),
                F("subject"),
                Coalesce(F("subject_list"), Value(0)),
                Coalesce(F("plan"), Value(0)),
                F("counted_per"),
                # A log-only policy is judged next to the one that is enforced in its place.
                Case(When(mode="log", then=Value(1)), default=Value(0)),
                condition=Q(starts_at__isnull=True, ends_at__isnull=True),
                name="ratequota_policy_one_undated",
                violation_error_message=_(
                    "A policy without dates already has the same audience, endpoint and “counted per”. Change that "
                    "policy or add dates to this one. To replace it, save one policy as “log only” and click "
                    "“Roll out”."
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.in_words(self.audience)

    def in_words(self, audience: str) -> str:
        """Return the policy in words, with these for its audience."""
        return f"{audience} × {self.endpoint or _('all endpoints')}: {self.rates}"

    @property
    def audience(self) -> str:
        """Return the policy's audience in words."""
        if self.user_id is not None:
            return _("user %s") % visible(self.user)
        if self.subject:
            return visible(self.subject)
        if self.subject_list_id is not None:
            return str(_("list %s") % self.subject_list)
        if self.plan_id is not None:
            return str(_("plan %s") % self.plan)
        return str(_("everyone"))

    def clean(self) -> None:
        """Validate the fields together; raise ``ValidationError`` with what to write instead."""
        errors: dict[str, Any] = {}
        known = (*COUNTED_PER, *settings.identifiers)
        if self.counted_per not in known:
            text = _("%(name)r is not a choice for “counted per”. Choose %(known)s.")
            errors["counted_per"] = text % {"name": self.counted_per, "known": ", ".join(known)}
        try:
            check_dates(self.starts_at, self.ends_at)
        except ValidationError as error:
            errors |= error.error_dict
        if errors:
            raise ValidationError(errors)
