"""The rows that a deletion takes along: the delete pages count ours, of which there may be thousands."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import NestedObjects, quote
from django.db import models
from django.utils.html import format_html
from django.utils.text import capfirst

from ..changes.databases import policy_alias
from ..models import TrackedModel
from ..models.fields import cascade
from .pages import model_url


class _Others(NestedObjects):
    """Collects the related rows of a deletion, but not those of ours that nothing refers to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: The rows that are left out.
        self.counted: list[models.QuerySet[Any]] = []

    def related_objects(self, related_model: Any, related_fields: Any, objs: Any) -> Any:
        """Return the rows that refer to the objects."""
        rows = super().related_objects(related_model, related_fields, objs)
        cascades = all(field.remote_field.on_delete in (models.CASCADE, cascade) for field in related_fields)
        if not cascades or not issubclass(related_model, TrackedModel) or related_model._meta.related_objects:
            return rows
        self.counted.append(rows)
        return rows.none()


class CountsDeleted:
    """Mixin before a ModelAdmin: its delete pages count our rows, of which there may be thousands."""

    admin_site: Any

    def get_deleted_objects(self, objs: Any, request: Any) -> tuple[list[Any], dict[Any, int], set[Any], list[Any]]:
        """Return what the delete pages show, with a fixed number of queries."""
        if not objs:
            return [], {}, set(), []
        site: Any = self.admin_site
        collector: Any = _Others(using=policy_alias(objs[0]._meta.model), origin=objs)
        collector.collect(objs)
        forbidden: set[Any] = set()

        def check(row: Any) -> None:
            model = type(row)
            if site.is_registered(model) and not site.get_model_admin(model).has_delete_permission(request, row):
                forbidden.add(row._meta.verbose_name)

        def line(row: Any) -> Any:
            check(row)
            kind, url = capfirst(row._meta.verbose_name), model_url(site, row, "change", quote(row.pk))
            return format_html('{}: <a href="{}">{}</a>', kind, url, row) if url else f"{kind}: {row}"

        lines = collector.nested(line)
        counts = {model._meta.verbose_name_plural: len(rows) for model, rows in collector.model_objs.items()}
        for rows in collector.counted:
            name = rows.model._meta.verbose_name_plural
            for row in rows.iterator():
                check(row)
                counts[name] = counts.get(name, 0) + 1
        return lines, counts, forbidden, [line(row) for row in collector.protected]
