"""The rows that a deletion takes along: the delete pages list the first of them and count the others."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import NestedObjects, quote
from django.db import models
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext

from ..changes.databases import policy_alias
from ..models import RatePolicy, TrackedModel
from ..models.fields import cascade
from .pages import model_url
from .permissions import OVERRIDES

#: Rows of each relation that a delete page lists.
LISTED = 100


class _FirstRows(NestedObjects):
    """Collects the related rows of a deletion, but only the first of ours that nothing refers to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: The relations of which only the first rows are collected.
        self.truncated: list[models.QuerySet[Any]] = []

    def related_objects(self, related_model: Any, related_fields: Any, objs: Any) -> Any:
        """Return the rows that refer to the objects."""
        rows = super().related_objects(related_model, related_fields, objs)
        cascades = all(field.remote_field.on_delete in (models.CASCADE, cascade) for field in related_fields)
        if not cascades or not issubclass(related_model, TrackedModel) or related_model._meta.related_objects:
            return rows
        # Each line names the row's related objects.
        named = [field.name for field in related_model._meta.concrete_fields if field.is_relation]
        first = rows.select_related(*named).order_by("pk")
        if rows.count() <= LISTED:
            return first
        self.truncated.append(rows)
        return first[:LISTED]


def deleted_objects(objs: Any, request: Any, site: Any) -> tuple[list[Any], dict[Any, int], set[Any], list[Any]]:
    """Return what ``ModelAdmin.get_deleted_objects`` returns, with a fixed number of queries.

    Permissions are checked for each listed row, and for one override and one other policy of the rest.
    """
    if not objs:
        return [], {}, set(), []
    collector: Any = _FirstRows(using=policy_alias(objs[0]._meta.model), origin=objs)
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
    for rows in collector.truncated:
        kinds = (OVERRIDES, ~OVERRIDES) if rows.model is RatePolicy else ()
        for policy in (rows.filter(kind).first() for kind in kinds):
            if policy is not None:
                line(policy)
        more = rows.count() - LISTED
        name = rows.model._meta.verbose_name_plural
        counts[name] += more
        lines.append(gettext("and %(more)s more %(kind)s") % {"more": more, "kind": name})
    return lines, counts, forbidden, [line(row) for row in collector.protected]
