"""Model fields that store rates and subjects in canonical form, and fields and a constraint that models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.db.models.lookups import IContains
from django.utils.translation import gettext_lazy as _

from ..changes.validators import canonical_subject, check_rates, rate_problem, visible
from ..engine.keys import short
from ..engine.rates import DEFAULT_ALGORITHM, normalize_rates
from ..exceptions import InvalidRate


class RatesField(models.CharField):  # type: ignore[type-arg]
    """Rates as text, such as ``10/s, 1000/hour burst 50``, made canonical by cleaning and storing.

    Both raise ``ValidationError`` with what was expected at which character. Cleaning an object also refuses rates
    that contradict its ``algorithm``; of what is stored, ``changes`` does.
    """

    def to_python(self, value: Any) -> Any:
        """Return the canonical text. Raises ``ValidationError``."""
        text = super().to_python(value)
        if not text:
            return text
        try:
            return normalize_rates(text)
        except InvalidRate as error:
            raise ValidationError(rate_problem(error), code="invalid_rate") from error

    def clean(self, value: Any, model_instance: models.Model | None) -> Any:
        """Return the canonical text. Raises ``ValidationError``."""
        text = super().clean(value, model_instance)
        if text:
            check_rates(text, getattr(model_instance, "algorithm", DEFAULT_ALGORITHM))
        return text

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the canonical text, and set it on the object."""
        value = self.get_prep_value(super().pre_save(model_instance, add))
        setattr(model_instance, self.attname, value)
        return value

    def get_prep_value(self, value: Any) -> Any:
        """Return the text for lookups: canonical, or unchanged if unreadable, so that such rows are found."""
        try:
            return self.to_python(value)
        except ValidationError:
            return models.Field.get_prep_value(self, value)

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        """Return the text to store, for saves, ``update`` and bulk writes alike. Raises ``ValidationError``."""
        if not hasattr(value, "as_sql"):  # only the database knows the value of an SQL expression
            value = self.to_python(value)
            if value == "" and not self.blank:
                raise ValidationError(self.error_messages["blank"], code="blank")
        return super().get_db_prep_save(value, connection)


class ExactField(models.CharField):  # type: ignore[type-arg]
    """A text that the database compares as Redis and Python do: by case, accents and trailing blanks.

    MySQL and MariaDB need a collation for that, and each has its own; ``utf8mb4_bin`` ignores trailing blanks.
    """

    def db_parameters(self, connection: Any) -> Any:
        """Return the parameters of the column."""
        return {**super().db_parameters(connection), "collation": exact_collation(connection)}

    def deconstruct(self) -> Any:
        """Deconstruct as an ExactField, because the column is the same."""
        name, _path, args, kwargs = super().deconstruct()
        return name, f"{ExactField.__module__}.{ExactField.__qualname__}", args, kwargs


class CountedField(ExactField):
    """The subject of a counter, which may be any text: it is stored and looked up as ``short`` returns it."""

    def get_prep_value(self, value: Any) -> Any:
        """Return the text of the column."""
        return value and short(super().get_prep_value(value))


def exact_collation(connection: Any) -> str | None:
    """Return the collation of an ``ExactField``; None = the default, where that is exact."""
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


@ExactField.register_lookup
class ContainsInAnyCase(IContains):
    """``icontains``, for which Django relies on the column's collation in MySQL and MariaDB."""

    def process_lhs(self, compiler: Any, connection: Any, lhs: Any = None) -> Any:
        """Return the SQL of the column."""
        sql, params = super().process_lhs(compiler, connection, lhs)
        return (f"{sql} COLLATE utf8mb4_general_ci" if connection.vendor == "mysql" else sql), params


class SubjectField(ExactField):
    """A subject such as ``ip:203.0.113.0/24``, stored in canonical form by saves, ``update`` and bulk writes.

    An invalid subject is stored unchanged, because its kind may be missing in IDENTIFIERS for now. Cleaning refuses
    it, by ``canonical``.
    """

    def __init__(self, *args: Any, canonical: Callable[[str], str] = canonical_subject, **kwargs: Any) -> None:
        self.canonical = canonical
        super().__init__(*args, **kwargs)

    def clean(self, value: Any, model_instance: models.Model | None) -> Any:
        """Return the canonical subject. Raises ``ValidationError`` with what to write instead."""
        text = super().clean(value, model_instance)
        if not text:
            return text
        subject = self.canonical(text)
        kind, _colon, value = subject.partition(":")
        if value[:1].isspace():  # saved by code, or with a click on such a caller, it is kept
            words = {"subject": visible(f"{kind}:{value.lstrip()}")}
            raise ValidationError(_("Enter %(subject)s without a space after the colon."), params=words)
        return subject

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the canonical subject, and set it on the object."""
        value = _canonical_or_unchanged(super().pre_save(model_instance, add))
        setattr(model_instance, self.attname, value)
        return value

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        """Return the text to store, for saves, ``update`` and bulk writes alike."""
        return super().get_db_prep_save(_canonical_or_unchanged(value), connection)


def user_or_subject(name: str) -> models.CheckConstraint:
    """Return the constraint that a row has a user or a subject, and not both."""
    return models.CheckConstraint(
        condition=(Q(user__isnull=True, subject__isnull=False) & ~Q(subject=""))
        | Q(user__isnull=False, subject__isnull=True),
        name=name,
        violation_error_message=_("Choose either a user or a subject."),
    )


def optional_reference(
    to: Any, name: Any, *, on_delete: Any = models.CASCADE, **options: Any
) -> models.ForeignKey[Any, Any]:
    """Return a foreign key that may be empty."""
    return models.ForeignKey(to, on_delete=on_delete, null=True, blank=True, verbose_name=name, **options)


def optional_user(related_name: str, help_text: Any, on_delete: Any) -> models.ForeignKey[Any, Any]:
    """Return a reference to a user that may be empty."""
    model = django_settings.AUTH_USER_MODEL
    return optional_reference(model, _("user"), related_name=related_name, on_delete=on_delete, help_text=help_text)


def optional_subject(help_text: Any, **options: Any) -> SubjectField:
    """Return a subject that may be empty: null, because a unique constraint on "" needs a condition.

    MariaDB cannot enforce conditions.
    """
    return SubjectField(_("subject"), max_length=200, null=True, blank=True, help_text=help_text, **options)


def optional_time(verbose_name: Any, help_text: Any) -> models.DateTimeField[Any, Any]:
    """Return a time that may be empty."""
    return models.DateTimeField(verbose_name, null=True, blank=True, help_text=help_text)


def description() -> models.TextField[Any, Any]:
    """Return the field for what operators write about an object."""
    return models.TextField(_("description"), blank=True, help_text=_("A text for operators. Clients never see it."))


def reason() -> models.CharField[Any, Any]:
    """Return the field for the note of a row, which is why the row exists; each change has a reason of its own."""
    text = _("A ticket or a contract, for example. Shown in lists.")
    return models.CharField(_("note"), max_length=200, blank=True, help_text=text)


def _canonical_or_unchanged(value: Any) -> Any:
    if not value or not isinstance(value, str):
        return value
    try:
        return canonical_subject(value)
    except ValidationError:
        return value


def cascade(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Delete rows with the object that they refer to, as ``models.CASCADE`` does, without a NULL in between.

    On MySQL and MariaDB, which defer no constraints, Django first sets a nullable column to NULL. A row that belongs
    to a user or to a subject cannot have neither.
    """
    source = field.remote_field.model
    collector.collect(sub_objs, source=source, source_attr=field.name, nullable=False, fail_on_restricted=False)
