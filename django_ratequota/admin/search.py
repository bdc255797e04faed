"""Search of the lists, such as that of policies, of which a large installation has a million."""

from __future__ import annotations

from itertools import islice
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.utils.text import smart_split, unescape_string_literal

#: Maximum number of words of a search, because each is looked up in several tables.
MOST_WORDS = 20
#: Maximum number of related objects, and of rows found, that are listed one by one in a query.
MOST_NAMED = 500


class SearchesRelated(admin.ModelAdmin):  # type: ignore[type-arg]
    """A list that searches related objects first, as joining them to its rows takes seconds."""

    def get_search_results(self, request: Any, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Return the rows that contain each word in one of the search fields, as Django does; none twice.

        More than ``MOST_WORDS`` find nothing.
        """
        own: list[str] = []
        related: dict[str, list[str]] = {}
        for name in self.get_search_fields(request):
            relation, _separator, field = str(name).partition("__")
            if field:
                related.setdefault(relation, []).append(field)
            else:
                own.append(relation)
        # The counts of each filter search again.
        known = request.__dict__.setdefault("_ratequota_searched", {})
        conditions: list[Q] = []
        words = words_of(search_term)
        if len(words) > MOST_WORDS:
            return queryset.none(), False
        for word in words:
            found = self.contains(own, word, queryset)
            for relation, fields in related.items():
                if (relation, word) not in known:
                    known[relation, word] = self._related(relation, fields, word)
                found |= self.refers(relation, known[relation, word])
            conditions.append(found)
        rows = queryset.filter(*conditions)
        if not (conditions and related) or any(isinstance(keys, QuerySet) for keys in known.values()):
            return rows, False
        # By key where they are few, because counting the rows and sorting them would each search all rows again.
        keys = list(rows.order_by().values_list("pk", flat=True)[: MOST_NAMED + 1])
        return (rows if len(keys) > MOST_NAMED else queryset.filter(pk__in=keys)), False

    def contains(self, fields: list[str], word: str, queryset: QuerySet[Any]) -> Q:
        """Return the condition of rows with the word in one of their fields; ``queryset`` has the filtered rows."""
        return _contains(fields, word)

    def refers(self, relation: str, keys: Any) -> Q:
        """Return the condition of rows that refer to an object with one of these keys, a list or a query."""
        return Q(**{f"{relation}__in": keys})

    def _related(self, relation: str, fields: list[str], word: str) -> Any:
        """Return the keys of the objects that contain the word; a query where they are too many to name."""
        model: Any = self.model._meta.get_field(relation).related_model
        keys = model._base_manager.filter(_contains(fields, word)).order_by().values_list("pk", flat=True)
        first = list(keys[: MOST_NAMED + 1])
        return keys if len(first) > MOST_NAMED else first


def words_of(search_term: str) -> list[str]:
    """Return the words of a search, and quoted texts; of too many, ``MOST_WORDS`` and one."""
    bits = islice(smart_split(search_term.replace("\x00", "")), MOST_WORDS + 1)
    return [unescape_string_literal(bit) if bit[0] in "\"'" and bit[0] == bit[-1] else bit for bit in bits]


def _contains(fields: list[str], word: str) -> Q:
    return Q(*((f"{field}__icontains", word) for field in fields), _connector=Q.OR)
