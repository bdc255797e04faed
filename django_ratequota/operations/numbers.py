"""Numbers as texts for operators."""

from __future__ import annotations

from django.utils.formats import number_format


def number(value: float) -> str:
    """Format the number for the active language, floats with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
    return number_format(text, use_l10n=True, force_grouping=True)
