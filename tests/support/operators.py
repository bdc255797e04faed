"""Operators of the admin, and a customer for them to look after."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy


def seen_in(page: Any) -> dict[str, str]:
    """Return the signed values with which the page's forms were rendered."""
    found = re.findall(r'<input type="hidden" name="((?:\w+-\d+-)?seen)" value="([^"]*)"', page.content.decode())
    return {name: unescape(value) for name, value in found}


class OperatorClient(Client):
    """A client that opens the page of a form before it sends the form, as a browser does."""

    def post(self, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Send the data, and the signed values of the page unless the data has some."""
        page = re.sub(r"/\w+/\?object=(\d+)$", r"/\1/change/", path)
        saves = isinstance(data, dict) and ("form-TOTAL_FORMS" in data or page.split("?")[0].endswith("/change/"))
        if saves and not any(name.endswith("seen") for name in data):
            data = {**seen_in(self.get(page)), **data}
        return super().post(path, data, *args, **kwargs)


def client_of(*permissions: str, superuser: bool = False, name: str = "operator") -> Client:
    """Return a client that is logged in as a new operator with these permissions (codenames)."""
    user = User.objects.create(username=name, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = OperatorClient()
    client.force_login(user)
    return client


def text_of(page: Any) -> str:
    """Return the content of a page; fails unless its status is 200."""
    assert page.status_code == 200
    return str(page.content.decode())


def words_of(page: Any) -> str:
    """Return the content of a page, unescaped and with single spaces; fails unless its status is 200."""
    return re.sub(r"\s+", " ", unescape(text_of(page)))


def a_customer() -> User:
    """Create alice, on the plan Free, with an override."""
    user = User.objects.create(username="alice")
    free = Plan.objects.create(name="Free", slug="free")
    PlanAssignment.objects.create(user=user, plan=free)
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(plan=free, rates="100/min")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="10/min")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="10000/month")
    RatePolicy.objects.create(user=user, rates="1000/day")  # a unit every 86 seconds: none during a test
    return user
