"""Permissions on policies: every kind of operator on every page, and the effect on rows and counters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings as project
from django.contrib import admin
from django.contrib.admin.templatetags.admin_urls import admin_urlname
from django.contrib.auth import get_permission_codename
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory
from django.urls import reverse

from django_ratequota import check_request
from django_ratequota.admin.permissions import permission_name
from django_ratequota.models import Endpoint, Plan, RatePolicy
from tests.support import operators

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]
of_auth_users = pytest.mark.skipif(
    project.AUTH_USER_MODEL != "auth.User", reason="looks for the links of django.contrib.auth's admin"
)

LIST = "/admin/django_ratequota/ratepolicy/"
OPERATORS: dict[str, tuple[str, ...] | None] = {
    "superuser": None,
    "editor": ("add_ratepolicy", "change_ratepolicy", "delete_ratepolicy", "view_ratepolicy"),
    "granter": ("grant_override",),
    "resetter": ("reset_usage",),
    "viewer": ("view_ratepolicy", "view_policychange"),
    "nobody": (),
}


class Scene:
    """One override, one policy of a plan, and the operator who edits them."""

    def __init__(self, operator: str) -> None:
        self.alice = User.objects.create(username="alice")
        self.free = Plan.objects.create(name="Free", slug="free")
        self.override = RatePolicy.objects.create(user=self.alice, rates="10/hour")
        self.policy = RatePolicy.objects.create(plan=self.free, rates="20/hour")
        self.client = client_of(operator)
        assert self.ask() == 9

    def ask(self) -> int:
        """Return what alice has left after one more request."""
        request = RequestFactory().get("/")
        request.user = self.alice
        decision = check_request(request)
        assert decision.binding is not None
        return decision.binding.remaining

    def state(self) -> Any:
        return list(RatePolicy.objects.order_by("pk").values_list("user", "subject", "plan", "rates", "mode"))

    def form(self, policy: RatePolicy | None = None, **fields: Any) -> dict[str, Any]:
        """Return the form data of a policy's page."""
        own = {"user": policy.user_id or "", "plan": policy.plan_id or "", "rates": policy.rates} if policy else {}
        form = {"counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce", "rates": "5/s"}
        return {**form, **own, **fields}

    def list_form(self, policy: RatePolicy) -> dict[str, Any]:
        """Return the form data of the list, with one row's mode edited."""
        rows = [row for row in (self.override, self.policy) if self.sees(row)]
        form = {"form-TOTAL_FORMS": str(len(rows)), "form-INITIAL_FORMS": str(len(rows)), "_save": "1"}
        for number, row in enumerate(rows):
            mode = "log" if row == policy else row.mode
            form |= {f"form-{number}-id": str(row.pk), f"form-{number}-mode": mode}
        return form

    def sees(self, policy: RatePolicy) -> bool:
        page = self.client.get(LIST)
        return page.status_code == 200 and policy in page.context["cl"].queryset


def client_of(operator: str) -> Client:
    permissions = OPERATORS[operator]
    return operators.client_of(*permissions or (), superuser=permissions is None, name=operator)


def action(name: str, *policies: RatePolicy, **fields: str) -> dict[str, Any]:
    return {"action": name, "_selected_action": [policy.pk for policy in policies], "post": "yes", **fields}


POSTS: dict[str, Callable[[Scene], tuple[str, dict[str, Any]]]] = {
    "add override": lambda s: ("add/", s.form(user=s.alice.pk, ends_at_0="2100-01-01", ends_at_1="00:00")),
    "add subject": lambda s: ("add/", s.form(subject="ip:203.0.113.7")),
    "add policy": lambda s: ("add/", s.form()),
    "change override": lambda s: (f"{s.override.pk}/change/", s.form(s.override, rates="7/s")),
    "change policy": lambda s: (f"{s.policy.pk}/change/", s.form(s.policy, rates="7/s")),
    "override to policy": lambda s: (f"{s.override.pk}/change/", s.form(s.override, user="")),
    "policy to override": lambda s: (f"{s.policy.pk}/change/", s.form(s.policy, plan="", subject="ip:::1")),
    "delete override": lambda s: (f"{s.override.pk}/delete/", {"post": "yes"}),
    "delete policy": lambda s: (f"{s.policy.pk}/delete/", {"post": "yes"}),
    "list override": lambda s: ("", s.list_form(s.override)),
    "list policy": lambda s: ("", s.list_form(s.policy)),
    "delete action override": lambda s: ("", action("delete_selected", s.override)),
    "delete action policy": lambda s: ("", action("delete_selected", s.policy)),
    "delete action both": lambda s: ("", action("delete_selected", s.policy, s.override)),
    "reset page": lambda s: (f"counters/?user={s.alice.pk}&bucket=all/hour", {}),
}
TAKES_EFFECT = {
    "superuser": set(POSTS),
    "editor": {"add policy", "change policy", "delete policy", "list policy", "delete action policy"},
    "granter": {
        "add override",
        "add subject",
        "change override",
        "delete override",
        "list override",
        "delete action override",
        # They cannot see the other one, and it stays.
        "delete action both",
    },
    "resetter": {"reset page"},
    "viewer": set(),
    "nobody": set(),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("post", POSTS)
def test_edits_take_effect_only_with_permission(operator: str, post: str) -> None:
    scene = Scene(operator)
    path, form = POSTS[post](scene)
    before, allowed = scene.state(), post in TAKES_EFFECT[operator]
    page = scene.client.post(LIST + path, form)
    if post.startswith("reset"):
        assert scene.state() == before
        assert scene.ask() == (9 if allowed else 8)
    else:
        assert (scene.state() != before) == allowed, page.content.decode()
    assert page.status_code == 302 or not allowed
    if operator in ("viewer", "nobody") and "action" not in post:
        assert page.status_code == 403
    if operator == "granter":
        assert RatePolicy.objects.filter(pk=scene.policy.pk).exists()


@pytest.mark.parametrize(
    ("operator", "inputs", "actions"),
    [
        ("superuser", True, {"delete_selected"}),
        ("editor", False, {"delete_selected"}),
        ("granter", True, {"delete_selected"}),
        ("resetter", False, set()),
        ("viewer", False, set()),
    ],
)
def test_links_are_offered_only_with_permission(operator: str, inputs: bool, actions: set[str]) -> None:
    """No link leads to a page that would be refused."""
    scene = Scene(operator)
    page = scene.client.get(f"{LIST}{scene.override.pk}/change/").content.decode()
    assert ('name="rates"' in page) is inputs
    form = scene.client.get(LIST).context["action_form"]
    assert ({name for name, _ in form.fields["action"].choices if name} if form else set()) == actions


@pytest.mark.parametrize(
    ("operator", "fields", "needed", "advice"),
    [
        ("editor", {"subject": "ip:203.0.113.7"}, "grant_override", "Leave user and subject empty."),
        ("granter", {}, "add_ratepolicy", "Choose a user or a subject."),
    ],
)
def test_the_form_names_the_missing_permission_and_keeps_the_input(
    operator: str, fields: dict[str, str], needed: str, advice: str
) -> None:
    scene = Scene(operator)
    page = scene.client.post(f"{LIST}add/", scene.form(**fields, rates="71/s", reason="Ticket 4711"))
    text = page.content.decode()
    assert re.search(rf"{advice}[^“]*“{permission_name(needed)}”", text)
    assert 'value="71/s"' in text
    assert 'value="Ticket 4711"' in text
    assert 'value="203.0.113.7"' not in text
    assert all(value in text for value in fields.values())


def test_the_table_of_an_endpoint_takes_no_override() -> None:
    """An override has no row in the table, and its id in the form data is refused."""
    scene = Scene("editor")
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.filter(pk=scene.override.pk).update(endpoint=search)
    user = User.objects.get(username="editor")
    user.user_permissions.add(*Permission.objects.filter(codename__in=["change_endpoint", "change_plan"]))
    form = {"name": "search", "description": "", "routes": "", "methods": "", "cost": "1", "limits": "own"}
    form |= {"policies-TOTAL_FORMS": "1", "policies-INITIAL_FORMS": "1", "policies-0-id": str(scene.override.pk)}
    row = {"endpoint": str(search.pk), "user": "", "plan": "", "counted_per": "caller", "rates": "1/s"}
    form |= {f"policies-0-{k}": v for k, v in {**row, "algorithm": "gcra", "mode": "off"}.items()}
    assert scene.client.post(f"/admin/django_ratequota/endpoint/{search.pk}/change/", form).status_code == 200
    form |= {"policies-INITIAL_FORMS": "0", "policies-0-id": "", "policies-0-subject": "ip:203.0.113.7"}
    form |= {"policies-0-user": str(scene.alice.pk)}
    assert scene.client.post(f"/admin/django_ratequota/endpoint/{search.pk}/change/", form).status_code == 302
    scene.override.refresh_from_db()
    assert (scene.override.rates, scene.override.mode) == ("10/hour", "enforce")
    assert not RatePolicy.objects.exclude(pk=scene.override.pk).exclude(user=None, subject="").exists()
    assert RatePolicy.objects.filter(endpoint=search, rates="1/s").count() == 1


def test_the_table_of_a_plan_is_read_only_for_granters() -> None:
    scene = Scene("granter")
    user = User.objects.get(username="granter")
    user.user_permissions.add(
        *Permission.objects.filter(codename__in=["change_plan", "view_ratepolicy", "view_endpoint"])
    )
    page = f"/admin/django_ratequota/plan/{scene.free.pk}/change/"
    text = scene.client.get(page).content.decode()
    assert "<p>20/hour</p>" in text
    assert 'name="policies-0-rates"' not in text
    form = {"name": "Free", "slug": "free", "description": "", "default_for": "", "position": "0"}
    form |= {"policies-TOTAL_FORMS": "2", "policies-INITIAL_FORMS": "1", "policies-0-id": str(scene.policy.pk)}
    for number in (0, 1):
        row = {"endpoint": "", "counted_per": "ip", "rates": "1/s", "algorithm": "gcra", "mode": "off"}
        form |= {f"policies-{number}-{name}": value for name, value in row.items()}
    before = scene.state()
    assert scene.client.post(page, form).status_code == 302
    assert scene.state() == before


@pytest.mark.parametrize("model", [Endpoint, User])
def test_deleting_objects_with_overrides_needs_the_permission_to_grant_them(model: Any) -> None:
    scene = Scene("editor")
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.all().delete()
    for user in (None, scene.alice):  # one that editors may delete comes first
        scene.override = RatePolicy.objects.create(endpoint=search, user=user, rates="1/s")
    editor = User.objects.get(username="editor")
    for action in ("delete", "view"):
        codename = get_permission_codename(action, model._meta)
        editor.user_permissions.add(Permission.objects.get(codename=codename))
    page = reverse(admin_urlname(model._meta, "delete"), args=[(scene.alice if model is User else search).pk])
    assert "your account doesn't have permission to delete" in scene.client.get(page).content.decode().replace(
        "&#x27;", "'"
    )
    assert scene.client.post(page, {"post": "yes"}).status_code == 403
    editor.user_permissions.add(Permission.objects.get(codename="grant_override"))
    assert scene.client.post(page, {"post": "yes"}).status_code == 302
    assert not RatePolicy.objects.filter(pk=scene.override.pk).exists()


@pytest.mark.parametrize(
    ("operator", "links"),
    [
        ("superuser", ["explain", "traffic", "health", "quotas", "invoices", "matrix"]),
        ("viewer", ["explain", "traffic", "health", "quotas", "invoices", "matrix"]),
        ("granter", ["explain", "traffic", "health", "quotas", "invoices"]),
        ("resetter", ["explain", "traffic", "health", "quotas", "invoices"]),
    ],
)
def test_links_lead_only_to_pages_that_open(operator: str, links: list[str]) -> None:
    client = client_of(operator)
    for page in ("/admin/django_ratequota/", LIST):
        text = client.get(page).content.decode()
        found = re.findall(r'<li><a href="(/admin/django_ratequota/\w+/(\w+)/)">', text)
        assert [name for _, name in found if name != "add"] == links, page
        assert {client.get(link).status_code for link, _ in found} == {200}


@pytest.mark.parametrize(
    ("permissions", "override", "policy"),
    [
        (("add_ratepolicy",), False, False),
        (("add_ratepolicy", "delete_ratepolicy"), False, False),
        (("add_ratepolicy", "reset_usage"), True, False),
        (("grant_override",), True, False),
        (("view_ratepolicy",), True, True),
    ],
)
def test_the_estimate_reveals_no_policy_that_its_page_hides(
    permissions: tuple[str, ...], override: bool, policy: bool
) -> None:
    """Regression: staff who may add a policy for a plan were shown the rates of every override."""
    scene = Scene("nobody")
    client = operators.client_of(*permissions, name="asker")
    other = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="77/hour")
    request = RequestFactory().get("/")
    request.user = User.objects.get(username="asker")
    for one, seen in ((scene.override, override), (other, override), (scene.policy, policy)):
        opened = client.get(f"{LIST}{one.pk}/change/")
        assert (opened.status_code == 200) is seen
        # Explain asks about policies that it has read itself.
        assert admin.site.get_model_admin(RatePolicy).has_view_permission(request, one) is seen
        page = client.get(f"{LIST}impact/", {"object": one.pk}).content.decode()
        assert ("Enter rates above first" not in page) is seen
        # Advice on a new policy may name this one, too.
        form = scene.form(subject=one.subject, user=one.user_id or "", plan=one.plan_id or "", rates="1/s")
        page_of_form = client.post(f"{LIST}impact/?object={one.pk}", form).content.decode()
        assert one.rates not in page_of_form or seen


def test_the_estimate_checks_the_permission_of_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project may override the permission to view for single policies."""
    scene = Scene("viewer")
    policies = admin.site.get_model_admin(RatePolicy)
    monkeypatch.setattr(policies, "has_view_permission", lambda request, obj=None: obj != scene.override)
    assert scene.client.get(f"{LIST}impact/", {"object": scene.override.pk}).status_code == 403
    assert scene.client.get(f"{LIST}impact/", {"object": scene.policy.pk}).status_code == 200


@of_auth_users
@pytest.mark.parametrize("codename", ["add_planassignment", "add_listmember", "grant_override"])
def test_the_field_for_a_users_id_links_to_users_only_with_permission_to_view_them(codename: str) -> None:
    model = {"add_planassignment": "planassignment", "add_listmember": "listmember"}.get(codename, "ratepolicy")
    found = []
    for name, more in (("blind", ()), ("seeing", ("view_user",))):
        client = operators.client_of(codename, *more, name=name)
        page = operators.text_of(client.get(f"/admin/django_ratequota/{model}/add/"))
        assert 'name="user"' in page
        found.append("/admin/auth/user/" in page or 'data-field-name="user"' in page)
    assert found == [False, True]
