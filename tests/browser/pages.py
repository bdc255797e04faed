"""Every page that the app has in the admin, as a path of a scene, and what each kind of operator gets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from .scene import MARKUP, Scene

_APP = "/admin/django_ratequota"
_POLICIES = f"{_APP}/ratepolicy"


@dataclass(frozen=True, slots=True)
class Page:
    """Where it is, and the status that who may only look gets there."""

    path: Callable[[Scene], str]
    viewer: int = 200


PAGES = {
    "home": Page(lambda s: f"{_APP}/"),
    "policies": Page(lambda s: f"{_POLICIES}/"),
    "add policy": Page(lambda s: f"{_POLICIES}/add/", viewer=403),
    "policy": Page(lambda s: f"{_POLICIES}/{s.free_search.pk}/change/"),
    "override": Page(lambda s: f"{_POLICIES}/{s.override.pk}/change/"),
    "hostile override": Page(lambda s: f"{_POLICIES}/{s.hostile_override.pk}/change/"),
    "long override": Page(lambda s: f"{_POLICIES}/{s.long_override.pk}/change/"),
    "hostile subject": Page(lambda s: f"{_POLICIES}/{s.hostile_subject.pk}/change/"),
    "explain": Page(lambda s: f"{_POLICIES}/explain/"),
    "explained": Page(lambda s: f"{_POLICIES}/explain/?user={s.bob.pk}&endpoint=search&method=GET"),
    "hostile explained": Page(
        lambda s: f"{_POLICIES}/explain/?user={s.mallory.pk}&endpoint={s.hostile_endpoint.name}&path={quote(MARKUP)}"
    ),
    "boost": Page(
        lambda s: f"{_POLICIES}/boost/?user={s.bob.pk}&endpoint=search&method=GET&policy={s.override.pk}",
        viewer=403,
    ),
    "give back": Page(
        lambda s: f"{_POLICIES}/counters/?user={s.bob.pk}&endpoint=search&method=GET&bucket=all/min", viewer=403
    ),
    "boost all": Page(lambda s: f"{_POLICIES}/boost/?user={s.dave.pk}", viewer=403),
    "block": Page(lambda s: f"{_POLICIES}/block/?caller=user:{s.bob.pk}&ip=ip:203.0.113.7", viewer=403),
    "traffic": Page(lambda s: f"{_POLICIES}/traffic/?span=day"),
    "hostile traffic": Page(lambda s: f"{_POLICIES}/traffic/?policy={s.hostile_override.pk}&order={quote(MARKUP)}"),
    "health": Page(lambda s: f"{_POLICIES}/health/"),
    "quotas": Page(lambda s: f"{_POLICIES}/quotas/?level=50"),
    "past quotas": Page(lambda s: f"{_POLICIES}/quotas/history/?subject=user:{s.mallory.pk}"),
    "past days": Page(
        lambda s: f"{_POLICIES}/quotas/history/?subject=user:{s.mallory.pk}&month={datetime.now(UTC):%Y-%m}-01"
    ),
    "invoices": Page(lambda s: f"{_POLICIES}/invoices/?month={datetime.now(UTC):%Y-%m}"),
    "matrix": Page(lambda s: f"{_APP}/plan/matrix/"),
    "copy": Page(lambda s: f"{_APP}/plan/{s.free.pk}/copy/", viewer=403),
    "assign": Page(lambda s: f"{_APP}/plan/{s.free.pk}/assign/", viewer=403),
    "hostile copy": Page(lambda s: f"{_APP}/plan/{s.hostile_plan.pk}/copy/", viewer=403),
    "roll out": Page(lambda s: f"{_POLICIES}/{s.logged.pk}/roll-out/", viewer=403),
    "plans": Page(lambda s: f"{_APP}/plan/"),
    "plan": Page(lambda s: f"{_APP}/plan/{s.free.pk}/change/"),
    "hostile plan": Page(lambda s: f"{_APP}/plan/{s.hostile_plan.pk}/change/"),
    "endpoints": Page(lambda s: f"{_APP}/endpoint/"),
    "endpoint": Page(lambda s: f"{_APP}/endpoint/{s.search.pk}/change/"),
    "hostile endpoint": Page(lambda s: f"{_APP}/endpoint/{s.hostile_endpoint.pk}/change/"),
    "assignments": Page(lambda s: f"{_APP}/planassignment/"),
    "add assignment": Page(lambda s: f"{_APP}/planassignment/add/", viewer=403),
    "hostile assignment": Page(lambda s: f"{_APP}/planassignment/{s.hostile_assignment.pk}/change/"),
    "lists": Page(lambda s: f"{_APP}/subjectlist/"),
    "hostile list": Page(lambda s: f"{_APP}/subjectlist/{s.hostile_list.pk}/change/"),
    "add members": Page(lambda s: f"{_APP}/subjectlist/{s.hostile_list.pk}/add-members/", viewer=403),
    "remove members": Page(lambda s: f"{_APP}/subjectlist/{s.hostile_list.pk}/remove-members/", viewer=403),
    "members": Page(lambda s: f"{_APP}/listmember/"),
    "member": Page(lambda s: f"{_APP}/listmember/{s.member.pk}/change/"),
    "history": Page(lambda s: f"{_APP}/policychange/"),
    "history of a plan": Page(lambda s: f"{_APP}/plan/{s.free.pk}/history/"),
    "save": Page(lambda s: f"{_APP}/policychange/save/{s.edit.change_id}/"),
    "hostile save": Page(lambda s: f"{_APP}/policychange/save/{s.hostile_edit.change_id}/"),
    "undo": Page(lambda s: f"{_APP}/policychange/{s.edit.pk}/revert/save/"),
    "hostile undo": Page(lambda s: f"{_APP}/policychange/{s.hostile_edit.pk}/revert/save/"),
    "restore": Page(lambda s: f"{_APP}/policychange/{s.edit.pk}/revert/object/"),
}
