"""Model fields that store rates and subjects in their canonical form, however they are written."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from ..engine.rates import DEFAULT_ALGORITHM, MAX_TEXT, normalize_rates, parse_rates
from ..exceptions import InvalidRate
from ..recording.validators import canonical_subject, rate_problem


class RatesField(models.CharField):  # type: ignore[type-arg]
    """Rates as text, such as ``10/s, 1000/hour burst 50``; cleaning and storing make the text canonical.

    Both raise ``ValidationError`` saying what was expected, at which character.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", MAX_TEXT)
        super().__init__(*args, **kwargs)

    def to_python(self, value: Any) -> Any:
        """The canonical text; raises ``ValidationError``."""
        text = super().to_python(value)
        if not text:
            return text
        try:
            return normalize_rates(text)
        except InvalidRate as error:
            raise ValidationError(rate_problem(error), code="invalid_rate") from error

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """The canonical text, put on the object as well, so that it reads as it is stored.

        Raises ``ValidationError`` where the rates make no sense together, or with the object's own ``algorithm``.
        """
        value = self.get_prep_value(super().pre_save(model_instance, add))
        setattr(model_instance, self.attname, value)
        algorithm = getattr(model_instance, "algorithm", DEFAULT_ALGORITHM)
        if value and isinstance(value, str) and isinstance(algorithm, str):  # no SQL expressions
            try:
                parse_rates(value, algorithm)
            except InvalidRate as error:
                raise ValidationError(rate_problem(error), code="invalid_rate") from error
        return value

    def get_prep_value(self, value: Any) -> Any:
        """The text to look for: text that cannot be read as it is, so that rows with it can be found."""
        try:
            return self.to_python(value)
        except ValidationError:
            return models.Field.get_prep_value(self, value)

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        """The text to store, by saving, ``update`` and bulk writes alike; raises ``ValidationError``."""
        if not hasattr(value, "as_sql"):  # what an SQL expression writes, only the database knows
            value = self.to_python(value)
            if value == "" and not self.blank:
                raise ValidationError(self.error_messages["blank"], code="blank")
        return super().get_db_prep_save(value, connection)


class SubjectField(models.CharField):  # type: ignore[type-arg]
    """A subject such as ``ip:203.0.113.0/24``; saving, ``update`` and bulk writes store its usual spelling.

    A subject that cannot be read is stored as it is: its kind may be missing in IDENTIFIERS for now. Forms refuse it.
    """

    def deconstruct(self) -> Any:
        """The field as migrations know it: its column is that of a CharField."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.CharField", args, kwargs

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """The usual spelling, put on the object as well, so that it reads as it is stored."""
        value = _usual_spelling(super().pre_save(model_instance, add))
        setattr(model_instance, self.attname, value)
        return value

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        """The text to store, by saving, ``update`` and bulk writes alike."""
        return super().get_db_prep_save(_usual_spelling(value), connection)


def _usual_spelling(value: Any) -> Any:
    if not value or not isinstance(value, str):
        return value
    try:
        return canonical_subject(value)
    except ValidationError:
        return value
