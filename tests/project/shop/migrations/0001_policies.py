"""Raises what everybody may do."""

from __future__ import annotations

from typing import Any

from django.db import migrations


def _raise(apps: Any, _editor: Any) -> None:
    apps.get_model("django_ratequota", "RatePolicy").objects.update(rates="9/hour")


class Migration(migrations.Migration):
    """Data alone."""

    dependencies = [("django_ratequota", "0001_initial")]
    operations = [migrations.RunPython(_raise, migrations.RunPython.noop)]
