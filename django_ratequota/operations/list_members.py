"""Add members to a subject list, or remove them, by lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext as _

from ..changes.databases import saving
from ..changes.writer import in_batches
from ..models import ListMember, SubjectList
from .pasted_lines import Line, key_of, problem_of, read_lines, stored_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The numbers of members that were added, given other dates, and found present, or written twice."""

    added: int
    changed: int
    present: int


def add_members(subject_list: SubjectList, lines: Sequence[Line], *, may_change: bool = True) -> Added:
    """Add the members; raises ``ValidationError`` with a message per bad line, and then adds nothing.

    A member that is in the list keeps its dates, unless the line has other ones, or its entry has ended: then these
    change, which ``may_change`` permits.
    """
    entries = read_lines(ListMember, lines, subject_list=subject_list)
    problems: list[str] = []
    added = changed = 0
    now = timezone.now()
    with saving(ListMember):
        for batch in in_batches(list(entries.items())):
            keys = [key for key, _entry in batch]
            stored = {key_of(row): row for row in stored_rows(ListMember, keys, subject_list=subject_list)}
            updates = []
            for key, (line, entry) in batch:
                member = stored.get(key)
                ended = member is not None and member.ends_at is not None and member.ends_at <= now
                if member is None or not (ended or (entry.ends_at and entry.ends_at != member.ends_at)):
                    continue
                if not may_change:
                    text = _("This entry is already in the list. You may not change its dates.")
                    problems.append(problem_of(line, text))
                member.starts_at = None if ended else member.starts_at
                member.ends_at = entry.ends_at
                member.reason = entry.reason or member.reason
                updates.append(member)
            new = [entry for key, (_line, entry) in batch if key not in stored]
            ListMember.objects.bulk_create(new)
            ListMember.objects.bulk_update(updates, ["starts_at", "ends_at", "reason"])
            added, changed = added + len(new), changed + len(updates)
        if problems:
            raise ValidationError(problems)
    return Added(added=added, changed=changed, present=len(lines) - added - changed)


def remove_members(subject_list: SubjectList, lines: Sequence[Line]) -> int:
    """Remove the members, and return their number; raises as ``add_members``, and then removes nothing."""
    removed = 0
    with saving(ListMember):
        for batch in in_batches(list(read_lines(ListMember, lines))):
            pks = [member.pk for member in stored_rows(ListMember, batch, subject_list=subject_list)]
            ListMember.objects.filter(pk__in=pks).delete()
            removed += len(pks)
    return removed
