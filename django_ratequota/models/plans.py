"""Plans, and their assignments to users and to subjects such as organisations."""

from __future__ import annotations

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..recording.validators import assignable_subject, check_dates, visible
from .base import RecordedModel
from .fields import SubjectField, cascade, user_or_subject


class Plan(RecordedModel):
    """A named tier, such as Free or Pro."""

    class DefaultFor(models.TextChoices):
        NOBODY = "", _("nobody")
        AUTHENTICATED = "authenticated", _("logged-in users without an assignment")
        ANONYMOUS = "anonymous", _("anonymous callers")

    name = models.CharField(
        _("name"), max_length=100, unique=True, help_text=_("What operators call this tier, such as Free or Pro.")
    )
    slug = models.SlugField(
        _("slug"), max_length=100, unique=True, help_text=_("What code calls it; PLAN_RESOLVER returns this.")
    )
    description = models.TextField(_("description"), blank=True, help_text=_("For operators; clients never see it."))
    position = models.PositiveIntegerField(
        _("position"),
        default=0,
        validators=[MaxValueValidator(10**9)],
        help_text=_("Where the plan stands among the others: lower numbers first, equal ones by name."),
    )
    default_for = models.CharField(
        _("default for"),
        max_length=20,
        blank=True,
        default="",
        choices=DefaultFor.choices,
        help_text=_("Callers who are on this plan without an assignment. Each kind has at most one default plan."),
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("plan")
        verbose_name_plural = _("plans")
        ordering = ["position", "name"]
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
    """A user, or a subject of IDENTIFIERS, is on a plan, from ``starts_at`` until ``ends_at``."""

    user = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=cascade,
        null=True,
        blank=True,
        related_name="ratequota_assignments",
        verbose_name=_("user"),
        help_text=_("The user who is put on the plan; or write a subject instead."),
    )
    # Null instead of "", as in ListMember.
    subject = SubjectField(
        _("subject"),
        max_length=200,
        null=True,
        blank=True,
        db_index=True,
        help_text=_("kind:value, such as tenant:acme or api_key:k_7: all of its callers are put on the plan."),
    )
    plan = models.ForeignKey(
        Plan,
        on_delete=models.CASCADE,
        related_name="assignments",
        db_index=False,  # the index below begins with it
        verbose_name=_("plan"),
        help_text=_("An assignment with an end outranks an open-ended one; among equals, the latest start counts."),
    )
    starts_at = models.DateTimeField(
        _("starts at"), default=timezone.now, help_text=_("The plan counts from this moment on.")
    )
    ends_at = models.DateTimeField(
        _("ends at"), null=True, blank=True, help_text=_("The plan counts until this moment; empty = open-ended.")
    )
    anchor = models.PositiveSmallIntegerField(
        _("months begin on day"),
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(31)],
        help_text=_(
            "Day of the month, 1 to 31, on which this customer's monthly quotas begin, or the last day of shorter "
            "months; empty = the first. A month with a new beginning starts a new count."
        ),
    )
    reason = models.CharField(
        _("reason"), max_length=200, blank=True, help_text=_("The reason, such as a ticket or a contract.")
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
        constraints = [
            user_or_subject("ratequota_assignment_one_subject"),
            models.CheckConstraint(
                condition=Q(anchor__isnull=True) | Q(anchor__gte=1, anchor__lte=31),
                name="ratequota_assignment_anchor",
                violation_error_message=_("A day of the month is a number from 1 to 31."),
            ),
        ]
        indexes = [
            # A plan's assignments in their order, and the subscribers of all plans from the index alone.
            models.Index(fields=["plan", "starts_at", "ends_at"], name="ratequota_assignment_plan"),
            models.Index(fields=["starts_at"], name="ratequota_assignment_start"),
        ]

    def __str__(self) -> str:
        return f"{self.who}: {self.plan}"

    @property
    def who(self) -> str:
        """Return who is on the plan, in words."""
        return visible(self.user if self.user_id is not None else self.subject or "")

    def clean(self) -> None:
        """Bring the subject into canonical form; raise ``ValidationError`` with what to write instead."""
        if self.subject:
            try:
                self.subject = assignable_subject(self.subject)
            except ValidationError as error:
                raise ValidationError({"subject": error}) from error
        check_dates(self.starts_at, self.ends_at)
