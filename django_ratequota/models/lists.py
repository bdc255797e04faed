"""Subject lists: named sets of users, subjects and networks, as one audience of policies."""

from __future__ import annotations

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..recording.validators import canonical_subject, check_dates, visible
from .base import RecordedModel
from .fields import SubjectField, cascade, user_or_subject


class SubjectList(RecordedModel):
    """A named set of users, subjects and networks, such as Bad bots or Partners."""

    name = models.CharField(
        _("name"), max_length=100, unique=True, help_text=_("What operators call this list, such as Bad bots.")
    )
    description = models.TextField(_("description"), blank=True, help_text=_("For operators; clients never see it."))

    class Meta(RecordedModel.Meta):
        verbose_name = _("subject list")
        verbose_name_plural = _("subject lists")
        ordering = ["name"]

    def __str__(self) -> str:
        return visible(self.name)


class ListMember(RecordedModel):
    """A user, a subject or a network is in a list, from ``starts_at`` until ``ends_at``."""

    subject_list = models.ForeignKey(
        SubjectList,
        on_delete=models.CASCADE,
        related_name="members",
        verbose_name=_("subject list"),
        help_text=_("The list. Its policies apply to all of its members."),
    )
    user = models.ForeignKey(
        django_settings.AUTH_USER_MODEL,
        on_delete=cascade,
        null=True,
        blank=True,
        related_name="ratequota_list_entries",
        verbose_name=_("user"),
        help_text=_("The user who is in the list; or write a subject instead."),
    )
    # Null instead of "", because a unique constraint then needs no condition, which MariaDB cannot enforce.
    subject = SubjectField(
        _("subject"),
        max_length=200,
        null=True,
        blank=True,
        help_text=_("kind:value, such as tenant:acme, ip:203.0.113.7, or a network such as ip:203.0.113.0/24."),
    )
    starts_at = models.DateTimeField(
        _("starts at"), null=True, blank=True, help_text=_("In the list from this moment on; empty = at once.")
    )
    ends_at = models.DateTimeField(
        _("ends at"), null=True, blank=True, help_text=_("In the list until this moment; empty = open-ended.")
    )
    reason = models.CharField(
        _("reason"), max_length=200, blank=True, help_text=_("The reason, such as a ticket or a contract.")
    )

    class Meta(RecordedModel.Meta):
        verbose_name = _("list member")
        verbose_name_plural = _("list members")
        ordering = ["subject_list__name", "pk"]
        constraints = [
            user_or_subject("ratequota_member_one_subject"),
            models.UniqueConstraint(
                fields=["subject_list", "user"],
                name="ratequota_member_unique_user",
                violation_error_message=_("This user is in the list already: edit the dates of that entry."),
            ),
            models.UniqueConstraint(
                fields=["subject_list", "subject"],
                name="ratequota_member_unique_subject",
                violation_error_message=_("This subject is in the list already: edit the dates of that entry."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.who} ({self.subject_list})"

    @property
    def who(self) -> str:
        """Return the member in words."""
        return _("user %s") % visible(self.user) if self.user_id is not None else visible(self.subject or "")

    def clean(self) -> None:
        """Bring the subject into canonical form; raise ``ValidationError`` with what to write instead."""
        if self.subject:
            try:
                self.subject = canonical_subject(self.subject)
            except ValidationError as error:
                raise ValidationError({"subject": error}) from error
        check_dates(self.starts_at, self.ends_at)
