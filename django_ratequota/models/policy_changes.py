"""The history of policy changes."""

from __future__ import annotations

from uuid import uuid4

from django.conf import settings as django_settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..changes.validators import visible
from .base import UnrecordedModel
from .fields import ExactField, optional_reference


class PolicyChange(UnrecordedModel):
    """One change of a policy, written in the change's own transaction, and never deleted.

    Rows have users' keys, not their names, which are looked up when they are shown. Only ``ratequota forget`` edits
    rows: it takes a person out. Resets of counters, units given back and moved are recorded here as well, with the
    subject's tag (``engine.keys``) as object id. Because they change no policy, processes that read the changes skip
    them. Ids are no revisions, because ids are not assigned in the order of commits.

    Rows with the same ``change_id`` were made together, by one *save*: a page of the admin, a command, an import, or
    else one transaction.
    """

    class Action(models.TextChoices):
        CREATE = "create", _("created")
        UPDATE = "update", _("changed")
        DELETE = "delete", _("deleted")
        PUBLISH = "publish", _("published")
        RESET = "reset", _("reset")
        GRANT = "grant", _("refunded")

    change_id = models.UUIDField(
        _("change id"),
        default=uuid4,
        editable=False,
        help_text=_("The same for all objects that were changed together."),
    )
    first = models.BooleanField(
        _("first"), default=True, editable=False, help_text=_("Whether the row is the first with its change id.")
    )
    undoes = models.UUIDField(
        _("undoes"), null=True, editable=False, help_text=_("Change id of the change that this one undoes.")
    )
    model = models.CharField(_("model"), max_length=50, help_text=_("Kind of the changed object. * = any."))
    object_id = ExactField(_("object id"), max_length=64, blank=True, help_text=_("Primary key of the object."))
    object_text = models.CharField(_("object"), max_length=300, blank=True, help_text=_("Name of the object."))
    touched_user = models.CharField(
        _("affected user"),
        max_length=255,
        blank=True,
        help_text=_("Primary key of the user, if the change affects only one."),
    )
    touched_plan = models.CharField(
        _("affected plan"),
        max_length=64,
        blank=True,
        help_text=_("Primary key of the plan, if the plan or one of its policies or assignments changed."),
    )
    action = models.CharField(_("action"), max_length=10, choices=Action.choices, help_text=_("Kind of change."))
    actor = optional_reference(
        django_settings.AUTH_USER_MODEL,
        _("changed by"),
        on_delete=models.SET_NULL,
        related_name="+",
        help_text=_("The user who made the change. Empty = code or a command."),
    )
    reason = models.CharField(_("reason"), max_length=200, blank=True, help_text=_("The reason, if one was entered."))
    key = ExactField(
        _("key"),
        max_length=64,
        null=True,
        editable=False,
        help_text=_("The key of a refund or reset. A second one with the same key changes nothing."),
    )
    before = models.JSONField(_("before"), null=True, help_text=_("The fields before the change."))
    after = models.JSONField(_("after"), null=True, help_text=_("The fields after the change."))
    at = models.DateTimeField(_("time"), auto_now_add=True, db_index=True, help_text=_("Time of the change."))

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("policy change")
        verbose_name_plural = _("policy changes")
        default_permissions = ("view",)
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["key"], name="ratequota_change_key")]
        indexes = [
            # For one object's history: its page, and restoring it.
            models.Index(fields=["model", "object_id"], name="ratequota_change_object"),
            # For the rows of a save, counted by kind without reading them.
            models.Index(fields=["change_id", "model", "action"], name="ratequota_change_save"),
            # For the list of saves, and their number.
            models.Index(fields=["first", "id"], name="ratequota_change_first"),
            models.Index(fields=["touched_plan", "model"], name="ratequota_change_plan"),
            # For the changes that affect a user, and the search for a user's id.
            models.Index(fields=["touched_user"], name="ratequota_change_user"),
        ]
        # Because Django's check of JSONField would otherwise open the database, and SQLite leave an empty file.
        required_db_features = ["supports_json_field"]

    def __str__(self) -> str:
        action, name = str(self.get_action_display()), visible(self.object_text)
        return f"{action}: {name}" if name else action  # a publication has no object


class SaveLock(UnrecordedModel):
    """The one row that each save of an operator writes first, so that it waits for the one before it."""

    taken_at = models.DateTimeField(_("taken at"), auto_now=True, help_text=_("Time at which the last save began."))

    class Meta(UnrecordedModel.Meta):
        verbose_name = _("save lock")
        verbose_name_plural = _("save locks")

    def __str__(self) -> str:
        return f"{self.taken_at}"
