"""Plans, endpoints and policies as operators edit them: fields, constraints, ``clean``."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, router, transaction
from django.db.models import CharField, F, Q, Value
from django.db.models.functions import Cast, Coalesce
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .conf import COUNTED_PER, settings
from .exceptions import InvalidRate
from .fields import RatesField
from .rates import ALGORITHMS, DEFAULT_ALGORITHM, MAX_UNITS, parse_rates
from .recording import RecordingManager
from .validation import canonical_subject, check_dates, visible

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class RecordedModel(models.Model):
    """A model whose changes are recorded (see ``recording``) in the transaction that makes them."""

    objects = RecordingManager()

    class Meta:
        abstract = True
        # Changes through related objects (plan.policies.add(...)) go by the base manager.
        base_manager_name = "objects"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """``Model.save`` in a transaction: outside one, Django would commit before the change is recorded."""
        with transaction.atomic(using=kwargs.get("using") or router.db_for_write(type(self), instance=self)):
            super().save(*args, **kwargs)


class Plan(RecordedModel):
    """A named tier, such as Free or Pro."""

    class DefaultFor(models.TextChoices):
        NOBODY = "", _("nobody")
        AUTHENTICATED = "authenticated", _("logged-in users without an assignment")
        ANONYMOUS = "anonymous", _("anonymous callers")

    name = models.CharField(
        _("name"),
        max_length=100,
        unique=True,
        help_text=_("What operators call this tier, such as Free or Pro."),
    )
    slug = models.SlugField(
        _("slug"), max_length=100, unique=True, help_text=_("What code calls it; PLAN_RESOLVER returns this.")
    )
    description = models.TextField(_("description"), blank=True, help_text=_("For operators; clients never see it."))
    default_for = models.CharField(
        _("default for"),
        max_length=20,
        blank=True,
        default="",
        choices=DefaultFor.choices,
        help_text=_("Who is on this plan without being assigned to it. At most one plan each."),
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("plan")
        verbose_name_plural = _("plans")
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["default_for"],
                condition=~Q(default_for=""),
                name="ratequota_plan_one_default",
                violation_error_message=_("Another plan is the default for these callers; change that one first."),
            )
        ]

    def __str__(self) -> str:
        return visible(self.name)


class PlanAssignment(RecordedModel):
    """A user is on a plan, from ``starts_at`` until ``ends_at``."""

    user = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="ratequota_assignments",
        verbose_name=_("user"),
        help_text=_("Who is put on the plan."),
    )
    plan = models.ForeignKey(
        Plan,
        on_delete=models.CASCADE,
        related_name="assignments",
        verbose_name=_("plan"),
        help_text=_("A dated assignment beats an open one; among equals the one that started last counts."),
    )
    starts_at = models.DateTimeField(
        _("starts at"), default=timezone.now, help_text=_("The plan counts from this moment on.")
    )
    ends_at = models.DateTimeField(
        _("ends at"),
        null=True,
        blank=True,
        help_text=_("The plan counts until this moment; empty = open-ended."),
    )
    reason = models.CharField(
        _("reason"),
        max_length=200,
        blank=True,
        help_text=_("Why, for whoever looks later: a ticket or a contract."),
    )
    created_by = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="+",
        verbose_name=_("created by"),
        help_text=_("The operator who made the assignment."),
    )
    created_at = models.DateTimeField(
        _("created at"), auto_now_add=True, help_text=_("When the assignment was made.")
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("plan assignment")
        verbose_name_plural = _("plan assignments")
        ordering = ["-starts_at"]

    def __str__(self) -> str:
        return f"{visible(self.user)}: {self.plan}"

    def clean(self) -> None:
        """Refuses an end that is not after the start."""
        check_dates(self.starts_at, self.ends_at)


class Endpoint(RecordedModel):
    """A named thing that is limited: code names it as a scope, or routes and methods match it."""

    name = models.SlugField(
        _("name"),
        max_length=100,
        unique=True,
        help_text=_(
            "The scope that code refers to (throttle_scope, ratequota(scope=...)). Clients see it in headers."
        ),
    )
    description = models.TextField(_("description"), blank=True, help_text=_("For operators; clients never see it."))
    routes = models.TextField(
        _("routes"),
        blank=True,
        help_text=_(
            "One pattern a line, * for anything: a URL name such as reports:*, or a route starting with / such as "
            "/api/v1/reports/*. Matched against the route that Django resolved, never the path that a client wrote."
        ),
    )
    methods = models.CharField(
        _("methods"),
        max_length=100,
        blank=True,
        help_text=_(
            "HTTP methods separated by spaces, such as GET POST; empty = all but OPTIONS. HEAD counts as GET."
        ),
    )
    cost = models.PositiveBigIntegerField(
        _("cost"),
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_UNITS)],
        help_text=_("Units that a request consumes, unless the code says otherwise."),
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("endpoint")
        verbose_name_plural = _("endpoints")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Brings routes and methods into canonical form; raises ``ValidationError`` naming line or word."""
        errors: dict[str, Any] = {}
        if self.name == "all":
            errors["name"] = _("Headers say 'all' for all endpoints together; choose another name.")
        lines = [line.strip() for line in self.routes.splitlines() if line.strip()]
        self.routes = "\n".join(lines)
        for line in lines:
            if len(line) > 500 or "\x00" in line or re.search(r"\s", line):
                errors["routes"] = _("%(line)r is no pattern: write a URL name or a route without spaces.") % {
                    "line": line[:60]
                }
            elif "://" in line or re.search(r"(?<!\()\?[\w.-]+=", line):
                errors["routes"] = _("%(line)r: write the route only, such as /api/reports/*, no host or query.") % {
                    "line": line[:60]
                }
        words = [word for word in re.split(r"[\s,]+", self.methods.upper()) if word]
        words = list(dict.fromkeys("GET" if word == "HEAD" else word for word in words))
        self.methods = " ".join(words)
        unknown = [word for word in words if word not in METHODS]
        if unknown:
            errors["methods"] = _("%(word)r is no HTTP method; write some of %(known)s.") % {
                "word": unknown[0][:30],
                "known": ", ".join(METHODS),
            }
        if errors:
            raise ValidationError(errors)


class RatePolicy(RecordedModel):
    """Who × what → rates: an audience, an endpoint, and how much."""

    class Mode(models.TextChoices):
        ENFORCE = "enforce", _("enforce")
        LOG = "log", _("log only")
        OFF = "off", _("off")

    class OnError(models.TextChoices):
        SETTING = "", _("as the setting ON_ERROR says")
        ALLOW = "allow", _("allow")
        DENY = "deny", _("deny (503)")
        LOCAL = "local", _("count in each process")

    endpoint = models.ForeignKey(
        Endpoint,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="policies",
        verbose_name=_("endpoint"),
        help_text=_("What is limited; empty = all endpoints together."),
    )
    user = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="ratequota_policies",
        verbose_name=_("user"),
        help_text=_("An override for this user; replaces what the plan or everyone's policy says here."),
    )
    subject = models.CharField(
        _("subject"),
        max_length=200,
        blank=True,
        default="",
        help_text=_(
            "An override for one subject, written kind:value: tenant:acme, ip:203.0.113.7, or a network such as "
            "ip:203.0.113.0/24 (the longest prefix wins)."
        ),
    )
    plan = models.ForeignKey(
        Plan,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="policies",
        verbose_name=_("plan"),
        help_text=_("Callers on this plan. With neither user, subject nor plan, the policy is for everyone."),
    )
    counted_per = models.CharField(
        _("counted per"),
        max_length=50,
        default="caller",
        help_text=_(
            "Who shares one counter: caller (each user, or IP when anonymous), ip, plan, everyone, or an identifier."
        ),
    )
    rates = RatesField(
        _("rates"),
        help_text=_(
            "Rates separated by commas, such as 10/s, 1000/hour burst 50, 100000/month; or unlimited, or blocked. "
            "A request must pass them all."
        ),
    )
    algorithm = models.CharField(
        _("algorithm"),
        max_length=30,
        default=DEFAULT_ALGORITHM,
        choices=[(name, name.replace("_", " ")) for name in ALGORITHMS],
        help_text=_("How rates that name no algorithm are counted; a month is always a calendar window."),
    )
    mode = models.CharField(
        _("mode"),
        max_length=10,
        default=Mode.ENFORCE,
        choices=Mode.choices,
        help_text=_("enforce refuses; log only counts and never refuses; off is as if the policy were not there."),
    )
    on_error = models.CharField(
        _("on error"),
        max_length=10,
        blank=True,
        default="",
        choices=OnError.choices,
        help_text=_("What happens while Redis gives no decision."),
    )
    starts_at = models.DateTimeField(
        _("starts at"), null=True, blank=True, help_text=_("Counts from this moment on; empty = at once.")
    )
    ends_at = models.DateTimeField(
        _("ends at"), null=True, blank=True, help_text=_("Counts until this moment; empty = open-ended.")
    )
    reason = models.CharField(
        _("reason"),
        max_length=200,
        blank=True,
        help_text=_("Why, for whoever looks later: a ticket or a contract."),
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("rate policy")
        verbose_name_plural = _("rate policies")
        ordering = ["endpoint__name", "plan__name", "pk"]
        # What these allow, and to whom, is decided in admin/rights.py.
        permissions = [
            ("reset_usage", "Can reset what was counted"),
            ("grant_override", "Can grant overrides to users and subjects"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(user__isnull=True, subject="")
                | Q(user__isnull=True, plan__isnull=True)
                | Q(subject="", plan__isnull=True),
                name="ratequota_policy_one_audience",
                violation_error_message=_("Choose one audience: user, subject or plan; leave the other two empty."),
            ),
            # NULLs count as equal here, which plain unique constraints deny on SQLite and old PostgreSQL.
            models.UniqueConstraint(
                Coalesce(F("endpoint"), Value(0)),
                Coalesce(Cast(F("user"), CharField()), Value("")),
                F("subject"),
                Coalesce(F("plan"), Value(0)),
                F("counted_per"),
                condition=Q(starts_at__isnull=True, ends_at__isnull=True),
                name="ratequota_policy_one_undated",
                violation_error_message=_(
                    "There is such a policy without dates already: same audience, endpoint and counted per. "
                    "Edit that one, or give this one dates."
                ),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.audience} × {self.endpoint or _('all endpoints')}: {self.rates}"

    @property
    def audience(self) -> str:
        """Whom the policy is for, in words."""
        if self.user_id is not None:
            return _("user %s") % visible(self.user)
        if self.subject:
            return visible(self.subject)
        if self.plan_id is not None:
            return _("plan %s") % self.plan
        return str(_("everyone"))

    def clean(self) -> None:
        """Judges the fields together; raises ``ValidationError`` saying what to write instead."""
        errors: dict[str, Any] = {}
        for name, check in (
            ("rates", self._check_rates),
            ("subject", self._check_subject),
            ("counted_per", self._check_counted_per),
            ("ends_at", lambda: check_dates(self.starts_at, self.ends_at)),
        ):
            try:
                check()
            except ValidationError as error:
                errors[name] = error.error_dict[name] if hasattr(error, "error_dict") else error
        if errors:
            raise ValidationError(errors)

    def _check_rates(self) -> None:
        try:
            parse_rates(self.rates, self.algorithm)
        except InvalidRate as error:
            raise ValidationError(str(error), code="invalid_rate") from error

    def _check_subject(self) -> None:
        if self.subject:
            self.subject = canonical_subject(self.subject)

    def _check_counted_per(self) -> None:
        known = (*COUNTED_PER, *settings.identifiers)
        if self.counted_per not in known:
            raise ValidationError(
                _("Nothing is counted per %(name)r; choose %(known)s."),
                params={"name": self.counted_per, "known": ", ".join(known)},
            )


class PolicyChange(models.Model):
    """One change to what is enforced, written in the change's own transaction; never edited, never deleted.

    Resets of what was counted and units given back are written here as well. They change nothing that is enforced,
    so processes that read the changes pass them over. Its ids are not revisions: ids are not handed out in the
    order of commits.
    """

    class Action(models.TextChoices):
        CREATE = "create", _("created")
        UPDATE = "update", _("changed")
        DELETE = "delete", _("deleted")
        PUBLISH = "publish", _("published")
        RESET = "reset", _("reset")
        GRANT = "grant", _("granted")

    model = models.CharField(_("model"), max_length=50, help_text=_("Kind of object that changed; * = any."))
    object_id = models.CharField(_("object id"), max_length=64, blank=True, help_text=_("Primary key of the object."))
    object_text = models.CharField(_("object"), max_length=300, blank=True, help_text=_("The object in words."))
    touched_user = models.CharField(
        _("user touched"),
        max_length=64,
        blank=True,
        help_text=_("Primary key of the user, when the change touches one user only."),
    )
    action = models.CharField(_("action"), max_length=10, choices=Action.choices, help_text=_("What happened to it."))
    actor = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("actor"),
        help_text=_("Who made the change; empty = code or a command."),
    )
    reason = models.CharField(_("reason"), max_length=200, blank=True, help_text=_("Why, where it was given."))
    before = models.JSONField(_("before"), null=True, help_text=_("The fields before the change."))
    after = models.JSONField(_("after"), null=True, help_text=_("The fields after the change."))
    at = models.DateTimeField(_("at"), auto_now_add=True, db_index=True, help_text=_("When the change was made."))

    class Meta:
        verbose_name = _("policy change")
        verbose_name_plural = _("policy changes")
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{self.get_action_display()}: {visible(self.object_text)}"


class UsageCount(models.Model):
    """Requests of one hour or day at one place, kept by ``ratequota rollup`` when Redis lets them go."""

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

    class Meta:
        verbose_name = _("usage count")
        verbose_name_plural = _("usage counts")
        ordering = ["-starts_at", "place"]
        constraints = [
            models.UniqueConstraint(fields=["length", "starts_at", "place"], name="ratequota_usage_one_row")
        ]

    def __str__(self) -> str:
        return f"{self.place} {self.starts_at:%Y-%m-%d %H:%M}"
