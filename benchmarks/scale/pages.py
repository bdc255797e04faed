"""The pages that are opened, by name, on the rows that ``seed`` made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Count, Q
from django.utils.http import urlencode

from benchmarks.scale.seed import ADMIN, FULL_PLAN, PLANNER
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, QuotaWindow, RatePolicy
from django_ratequota.monitoring.refusals import refusals

#: Django's own list of a million rows, which the others are compared with.
BASE = "users (Django's own list)"
FOR_EVERYONE = Q(user=None, subject="", subject_list=None, plan=None, endpoint=None)
_APP = "/admin/django_ratequota"
_POLICIES = f"{_APP}/ratepolicy"


@dataclass(frozen=True, slots=True)
class Page:
    """The address of a page, who opens it, and what is posted to it; None = nothing, it is only opened."""

    path: str
    operator: str = ADMIN
    data: dict[str, Any] | None = field(default=None)
    #: The page whose form is posted; "" = none, ``data`` is.
    form: str = ""
    #: What is filled in there: field -> two values, which take turns, so that each save changes something.
    edits: dict[str, tuple[str, str]] = field(default_factory=dict)


def pages() -> dict[str, Page]:
    """Return name -> page, in the order of the table."""
    pro = Plan.objects.get(slug=FULL_PLAN)
    busy = Endpoint.objects.annotate(number=Count("policies")).order_by("-number", "pk")[0]
    policy = RatePolicy.objects.filter(plan=pro, endpoint=busy).order_by("pk")[0]
    override = RatePolicy.objects.filter(user__isnull=False).order_by("pk")[0]
    user = User.objects.filter(is_staff=False).order_by("pk")[0]
    subject = RatePolicy.objects.exclude(subject="").order_by("-pk")[0].subject
    small = Plan.objects.exclude(pk=pro.pk).order_by("pk")[0]
    change = PolicyChange.objects.order_by("-pk")[0]
    assignment = PlanAssignment.objects.filter(subject__isnull=False).order_by("-pk")[0]
    rows = list(RatePolicy.objects.order_by("pk").values_list("pk", flat=True)[:50])
    assigned = list(PlanAssignment.objects.order_by("pk").values_list("pk", flat=True)[:50])
    found = {
        BASE: Page("/admin/auth/user/"),
        "a user": Page(f"/admin/auth/user/{user.pk}/change/"),
        "start of the app": Page(f"{_APP}/"),
        **_policy_pages(policy, override, subject, user, busy, pro),
        "policies, asking to delete 50": Page(
            f"{_POLICIES}/", data={"action": "delete_selected", "_selected_action": rows}
        ),
        "plans": Page(f"{_APP}/plan/"),
        "plans, search": Page(f"{_APP}/plan/?q=partner"),
        "plan of 500 policies": Page(f"{_APP}/plan/{pro.pk}/change/"),
        "plan of 500 policies, endpoints hidden": Page(f"{_APP}/plan/{pro.pk}/change/", PLANNER),
        "plan of 500 policies, save": _save(f"{_APP}/plan/{pro.pk}/change/", description=("One", "Two")),
        "plan of 75 policies": Page(f"{_APP}/plan/{small.pk}/change/"),
        "plan of 75 policies, save a row": _save(
            f"{_APP}/plan/{small.pk}/change/", **{"policies-0-rates": ("61/min", "62/min")}
        ),
        "plan, assign to many": Page(f"{_APP}/plan/{small.pk}/assign/"),
        "plan, copy": Page(f"{_APP}/plan/{pro.pk}/copy/"),
        "plan, asking to delete": Page(f"{_APP}/plan/{pro.pk}/delete/"),
        "matrix": Page(f"{_APP}/plan/matrix/"),
        "matrix, search": Page(f"{_APP}/plan/matrix/?q=billing"),
        "endpoints": Page(f"{_APP}/endpoint/"),
        "endpoint": Page(f"{_APP}/endpoint/{busy.pk}/change/"),
        "endpoint, save": _save(f"{_APP}/endpoint/{busy.pk}/change/", description=("One", "Two")),
        "endpoint, asking to delete": Page(f"{_APP}/endpoint/{busy.pk}/delete/"),
        "assignments": Page(f"{_APP}/planassignment/"),
        "assignments, active": Page(f"{_APP}/planassignment/?time=active"),
        "assignments, of a plan": Page(f"{_APP}/planassignment/?plan__id__exact={pro.pk}"),
        "assignments, last subjects first": Page(f"{_APP}/planassignment/?o=-1"),
        "assignments, search a user": Page(f"{_APP}/planassignment/?q={user.username}"),
        "assignments, search a subject": Page(f"{_APP}/planassignment/?q={assignment.subject}"),
        "assignments, search a plan": Page(f"{_APP}/planassignment/?q=partner"),
        "assignment": Page(f"{_APP}/planassignment/{assignment.pk}/change/"),
        "assignment, add": Page(f"{_APP}/planassignment/add/?plan={pro.pk}"),
        "assignment, asking to delete": Page(f"{_APP}/planassignment/{assignment.pk}/delete/"),
        "assignments, asking to delete 50": Page(
            f"{_APP}/planassignment/", data={"action": "delete_selected", "_selected_action": assigned}
        ),
        "history": Page(f"{_APP}/policychange/"),
        "history, search": Page(f"{_APP}/policychange/?q=4711"),
        "history, of policies": Page(f"{_APP}/policychange/?model=ratepolicy"),
        "save": Page(f"{_APP}/policychange/save/{change.change_id}/"),
        "save, restore": Page(f"{_APP}/policychange/{change.pk}/revert/object/"),
        **{f"find {model}": _autocomplete(model, term) for model, term in _TERMS.items()},
    }
    return found


_TERMS = {"plan": "part", "endpoint": "bill", "user": "alice12"}


def _autocomplete(name: str, term: str) -> Page:
    query = {"app_label": "django_ratequota", "model_name": "ratepolicy", "field_name": name, "term": term}
    return Page(f"/admin/autocomplete/?{urlencode(query)}")


def _save(path: str, **edits: tuple[str, str]) -> Page:
    return Page(path, form=path, edits=edits)


def _edited(name: str, policy: Any) -> dict[str, Page]:
    """Return the policy's save, and the estimate on its form."""
    form = f"{_POLICIES}/{policy.pk}/change/"
    rates = {"rates": ("61/min", "62/min")}
    estimate = Page(f"{_POLICIES}/impact/?object={policy.pk}", form=form, edits=rates)
    return {f"{name}, save": _save(form, **rates), f"{name}, estimate": estimate}


def _quota_pages() -> dict[str, Page]:
    row = QuotaWindow.objects.order_by("starts_at", "pk")[0]
    user = User.objects.get(pk=row.subject.partition(":")[2])
    page = f"{_POLICIES}/quotas/"
    return {
        "quotas": Page(page),
        "quotas, all": Page(f"{page}?level=0"),
        "quotas, used up": Page(f"{page}?level=100"),
        "quotas, of a policy": Page(f"{page}?level=0&policy={row.policy_id}"),
        "quotas, search a user": Page(f"{page}?level=0&q={user.username}"),
        "quotas, search a subject": Page(f"{page}?level=0&q={row.subject}"),
        "quotas, search nothing": Page(f"{page}?level=0&q=nothing-like-it"),
        "quotas, CSV of those used up": Page(f"{page}?csv=1&level=100"),
        "past quotas": Page(f"{page}history/?subject={row.subject}"),
        "past quotas, the days of a month": Page(f"{page}history/?subject={row.subject}&month={row.first_day}"),
        "invoices": Page(f"{_POLICIES}/invoices/?month={row.starts_at:%Y-%m}"),
        "invoices, of a subject": Page(f"{_POLICIES}/invoices/?month={row.starts_at:%Y-%m}&subject={row.subject}"),
    }


def _policy_pages(policy: Any, override: Any, subject: str, user: Any, endpoint: Any, plan: Any) -> dict[str, Page]:
    caller = f"user={override.user_id}&endpoint={endpoint.name}&method=GET"
    last = RatePolicy.objects.count() // 50
    found = {
        "policies": Page(f"{_POLICIES}/"),
        "policies, last page": Page(f"{_POLICIES}/?p={last}"),
        "policies, by audience": Page(f"{_POLICIES}/?o=1"),
        "policies, log only": Page(f"{_POLICIES}/?mode__exact=log"),
        "policies, overrides": Page(f"{_POLICIES}/?audience=override"),
        "policies, of an endpoint": Page(f"{_POLICIES}/?endpoint__id__exact={endpoint.pk}"),
        "policies, search a user": Page(f"{_POLICIES}/?q={override.user.username}"),
        "policies, search a subject": Page(f"{_POLICIES}/?q={subject}"),
        "policies, search a plan": Page(f"{_POLICIES}/?q={plan.name}"),
        "policies, search two words": Page(f"{_POLICIES}/?q=sales+billing"),
        "policies, search nothing": Page(f"{_POLICIES}/?q=nothing-like-it"),
        "policies, search overrides": Page(f"{_POLICIES}/?q=alice&audience=user&mode__exact=enforce"),
        "policy": Page(f"{_POLICIES}/{policy.pk}/change/"),
        "override": Page(f"{_POLICIES}/{override.pk}/change/"),
        **_edited("policy", policy),
        **_edited("override", override),
        **_edited("policy for everyone", RatePolicy.objects.filter(FOR_EVERYONE).order_by("pk")[0]),
        "policies, save modes": _save(f"{_POLICIES}/", **{"form-0-mode": ("log", "enforce")}, _save=("1", "1")),
        "policy, add": Page(f"{_POLICIES}/add/"),
        "policy, asking to delete": Page(f"{_POLICIES}/{policy.pk}/delete/"),
        "explain, empty": Page(f"{_POLICIES}/explain/"),
        "explain, a user": Page(f"{_POLICIES}/explain/?{caller}"),
        "explain, an address": Page(f"{_POLICIES}/explain/?caller=ip:198.18.0.1&endpoint={endpoint.name}"),
        "traffic, hour": Page(f"{_POLICIES}/traffic/"),
        "traffic, day": Page(f"{_POLICIES}/traffic/?span=day"),
        "traffic, week": Page(f"{_POLICIES}/traffic/?span=week"),
        "health": Page(f"{_POLICIES}/health/"),
        **_quota_pages(),
    }
    newest = refusals(1)
    if newest:
        found["explain, a refusal"] = Page(f"{_POLICIES}/explain/?id={newest[0].id}")
    return found
