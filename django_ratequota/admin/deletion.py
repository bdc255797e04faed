"""The rows that a deletion takes along: the delete pages count ours, of which there may be thousands."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import NestedObjects, quote
from django.db import models
from django.db.models import Q
from django.utils.html import format_html
from django.utils.text import capfirst

from ..changes.databases import policy_alias
from ..models import RatePolicy, TrackedModel
from ..models.fields import cascade
from .pages import model_url
from .permissions import OVERRIDES


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
        """Return what the delete pages show, with a fixed number of queries.

        Permissions are checked for each listed row, and for one override and one other policy of those that are
        counted.
        """
        if not objs:
            return [], {}, set(), []
        site: Any = self.admin_site
        collector: Any = _Others(using=policy_alias(objs[0]._meta.model), origin=objs)
        collector.collect(objs)
        forbidden: set[Any] = set()

        def line(row: Any) -> Any:
            opts = row._meta
            kind = capfirst(opts.verbose_name)
            if not site.is_registered(type(row)):
                return f"{kind}: {row}"
            if not site.get_model_admin(type(row)).has_delete_permission(request, row):
                forbidden.add(opts.verbose_name)
            url = model_url(site, row, "change", quote(row.pk))
            return format_html('{}: <a href="{}">{}</a>', kind, url, row) if url else f"{kind}: {row}"

        lines = collector.nested(line)
        counts = {model._meta.verbose_name_plural: len(rows) for model, rows in collector.model_objs.items()}
        for rows in collector.counted:
            if count := rows.count():
                name = rows.model._meta.verbose_name_plural
                counts[name] = counts.get(name, 0) + count
                kinds = (OVERRIDES, ~OVERRIDES) if rows.model is RatePolicy else (Q(),)
                for row in filter(None, (rows.filter(kind).first() for kind in kinds)):
                    line(row)
        return lines, counts, forbidden, [line(row) for row in collector.protected]
