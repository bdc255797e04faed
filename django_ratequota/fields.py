"""A model field that holds rate text in its canonical form."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from .exceptions import InvalidRate
from .rates import MAX_TEXT, normalize_rates
from .validation import rate_problem


class RatesField(models.CharField):  # type: ignore[type-arg]
    """Rates as text, such as ``10/s, 1000/hour burst 50``; cleaning stores the canonical text.

    Cleaning raises ``ValidationError`` saying what was expected, at which character.
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
        """The canonical text, put on the object as well, so that it reads as it is stored."""
        value = self.get_prep_value(super().pre_save(model_instance, add))
        setattr(model_instance, self.attname, value)
        return value

    def get_prep_value(self, value: Any) -> Any:
        """What the database stores. Unreadable text stays as it is, for ``full_clean`` to refuse."""
        try:
            return self.to_python(value)
        except ValidationError:
            return models.Field.get_prep_value(self, value)
