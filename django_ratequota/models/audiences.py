"""The audiences of policies: plans and their assignments, and lists of users, subjects and networks."""

from __future__ import annotations

from django.conf import settings as django_settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..changes.validators import assignable_subject, check_dates, visible
from . import fields
from .base import TrackedModel


class Plan(TrackedModel):
    """A named tier, such as Free or Pro."""

    class DefaultFor(models.TextChoices):
        NOBODY = "", _("nobody")
        AUTHENTICATED = "authenticated", _("logged-in users without an assignment")
        ANONYMOUS = "anonymous", _("anonymous clients")

    name = models.CharField(
        _("name"), max_length=100, unique=True, help_text=_("Name of this tier, such as Free or Pro.")
    )
    slug = models.SlugField(
        _("slug"),
        max_length=100,
        unique=True,
        help_text=_("Name in code and policy files. PLAN_RESOLVER returns it."),
    )
    description = fields.description()
    position = models.PositiveIntegerField(
        _("position"),
        default=0,
        validators=[MaxValueValidator(10**9)],
        help_text=_("Place in lists of plans. Lower numbers come first. Equal numbers are ordered by name."),
    )
    default_for = models.CharField(
        _("default for"),
        max_length=20,
        blank=True,
        default="",
        choices=DefaultFor.choices,
        help_text=_("Customers that are on this plan without an assignment. Each kind has at most one default plan."),
    )

    class Meta(TrackedModel.Meta):
        verbose_name = _("plan")
        verbose_name_plural = _("plans")
        ordering = ["position", "name"]
        constraints = [
            models.UniqueConstraint(
                fields=["default_for"],
                condition=~Q(default_for=""),
                name="ratequota_plan_one_default",
                violation_error_message=_("Another plan is the default for these customers. Change that plan first."),
            )
        ]

    def __str__(self) -> str:
        return visible(self.name)


class PlanAssignment(TrackedModel):
    """A user, or a subject of IDENTIFIERS, is on a plan, from ``starts_at`` until ``ends_at``."""

    user = fields.optional_user(
        "ratequota_assignments", _("The user on the plan. Choose either a user or a subject."), fields.cascade
    )
    subject = fields.optional_subject(
        _("kind:value, such as tenant:acme or api_key:k_7. All clients of the subject are on the plan."),
        db_index=True,
        canonical=assignable_subject,
    )
    plan = models.ForeignKey(
        Plan,
        on_delete=models.CASCADE,
        related_name="assignments",
        db_index=False,  # the index below begins with it
        verbose_name=_("plan"),
        help_text=_(
            "An assignment with an end takes precedence over an open-ended one. Among equals, the latest start wins."
        ),
    )
    starts_at = models.DateTimeField(
        _("starts at"), default=timezone.now, help_text=_("The plan applies from this moment on.")
    )
    ends_at = fields.optional_time(_("ends at"), _("The plan applies until this moment. Empty = open-ended."))
    anchor = models.PositiveSmallIntegerField(
        _("months begin on day"),
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(31)],
        help_text=_(
            "Day of the month, 1 to 31, on which this customer's monthly quotas begin. Shorter months use their last "
            "day. Empty = the day of the customer's other assignments, or the first. Changing the day restarts "
            "the counters of the current month."
        ),
    )
    reason = fields.reason()
    created_by = fields.optional_reference(
        django_settings.AUTH_USER_MODEL,
        _("created by"),
        on_delete=models.SET_NULL,
        editable=False,
        related_name="+",
        help_text=_("The operator who made the assignment."),
    )
    created_at = models.DateTimeField(
        _("created at"), default=timezone.now, editable=False, help_text=_("Time of the assignment.")
    )

    class Meta(TrackedModel.Meta):
        verbose_name = _("plan assignment")
        verbose_name_plural = _("plan assignments")
        ordering = ["-starts_at"]
        constraints = [
            fields.user_or_subject("ratequota_assignment_one_subject"),
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
            # For those that end soon.
            models.Index(fields=["ends_at"], name="ratequota_assignment_end"),
        ]

    def __str__(self) -> str:
        return self.in_words(self.who)

    def in_words(self, who: str) -> str:
        """Return the assignment in words, with these for who is on the plan."""
        return f"{who}: {self.plan}"

    @property
    def who(self) -> str:
        """Return who is on the plan, in words."""
        return visible(self.user if self.user_id is not None else self.subject or "")

    def clean(self) -> None:
        """Raise ``ValidationError`` with what is wrong with the dates."""
        check_dates(self.starts_at, self.ends_at)


class SubjectList(TrackedModel):
    """A named set of users, subjects and networks, such as Bad bots or Partners."""

    name = models.CharField(
        _("name"), max_length=100, unique=True, help_text=_("Name of this list, such as Bad bots.")
    )
    description = fields.description()

    class Meta(TrackedModel.Meta):
        verbose_name = _("subject list")
        verbose_name_plural = _("subject lists")
        ordering = ["name"]

    def __str__(self) -> str:
        return visible(self.name)


class ListMember(TrackedModel):
    """A user, a subject or a network is in a list, from ``starts_at`` until ``ends_at``."""

    subject_list = models.ForeignKey(
        SubjectList,
        on_delete=models.CASCADE,
        related_name="members",
        verbose_name=_("subject list"),
        help_text=_("The list. Its policies apply to all members."),
    )
    user = fields.optional_user(
        "ratequota_list_entries", _("The user in the list. Choose either a user or a subject."), fields.cascade
    )
    subject = fields.optional_subject(
        _("kind:value, such as tenant:acme or ip:203.0.113.7, or a network such as ip:203.0.113.0/24.")
    )
    starts_at = fields.optional_time(_("starts at"), _("In the list from this moment on. Empty = at once."))
    ends_at = fields.optional_time(_("ends at"), _("In the list until this moment. Empty = open-ended."))
    reason = fields.reason()

    class Meta(TrackedModel.Meta):
        verbose_name = _("list member")
        verbose_name_plural = _("list members")
        ordering = ["subject_list__name", "pk"]
        constraints = [
            fields.user_or_subject("ratequota_member_one_subject"),
            models.UniqueConstraint(
                fields=["subject_list", "user"],
                name="ratequota_member_unique_user",
                violation_error_message=_("This user is already in the list. Change the dates of that entry."),
            ),
            models.UniqueConstraint(
                fields=["subject_list", "subject"],
                name="ratequota_member_unique_subject",
                violation_error_message=_("This subject is already in the list. Change the dates of that entry."),
            ),
        ]

    def __str__(self) -> str:
        return self.in_words(self.who)

    def in_words(self, who: str) -> str:
        """Return the membership in words, with these for the member."""
        return f"{who} ({self.subject_list})"

    @property
    def who(self) -> str:
        """Return the member in words."""
        return _("user %s") % visible(self.user) if self.user_id is not None else visible(self.subject or "")

    def clean(self) -> None:
        """Raise ``ValidationError`` with what is wrong with the dates."""
        check_dates(self.starts_at, self.ends_at)
