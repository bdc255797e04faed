"""Names that equal others: a stranger's user name and a customer's email address or key, and stored subjects."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_ratequota import check_request
from django_ratequota.engine.keys import short
from django_ratequota.ledger.book import flush
from django_ratequota.models import ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.operations.subjects import find_accounts
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.operators import client_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

ADMIN = "/admin/django_ratequota"
EXPLAIN = f"{ADMIN}/ratepolicy/explain/"


@pytest.fixture
def customer() -> User:
    """Whom operators mean."""
    return User.objects.create(username="bigco", email="ceo@bigco.example")


def test_an_address_is_found_as_it_is_typed_and_in_lower_case() -> None:
    """SQLite, and PostgreSQL with the locale C, put no letters beyond ASCII in lower case."""
    customer = User.objects.create(username="bigco", email="JÖRG@Firma.example")
    stranger = User.objects.create(username=customer.email)
    assert find_accounts([customer.email])[customer.email].keys() == {f"user:{customer.pk}", f"user:{stranger.pk}"}


def test_an_address_that_is_the_login_name_is_found_in_any_case(
    customer: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(User, "USERNAME_FIELD", "email")
    stranger = User.objects.create(username="other", email="CEO@bigco.example")
    assert find_accounts(["CEO@bigco.example"])["CEO@bigco.example"].keys() == {
        f"user:{customer.pk}",
        f"user:{stranger.pk}",
    }


@pytest.fixture(params=["email", "email in capitals", "key"])
def text(request: Any, customer: User) -> str:
    """What operators write, and a stranger has taken as his name."""
    names = {"email": "ceo@bigco.example", "email in capitals": "CEO@BigCo.example", "key": str(customer.pk)}
    return User.objects.create(username=names[request.param]).username


@pytest.fixture
def operator() -> Client:
    return client_of(superuser=True)


@pytest.fixture
def refusal(customer: User, text: str) -> str:
    """Return the sentence that lists both."""
    both = sorted((user.pk, f"user:{user.pk} ({user})") for user in (customer, User.objects.get(username=text)))
    return f"2 accounts match: {both[0][1]}, {both[1][1]}. Enter the one that you mean as kind:value."


def test_a_user_name_that_equals_an_email_address(operator: Client, customer: User, text: str, refusal: str) -> None:
    """Explain opens neither, and offers no boost or block."""
    RatePolicy.objects.create(rates="5/hour")
    page = words_of(operator.get(EXPLAIN, {"id": text}))
    assert refusal in page
    assert not re.search(r"(?:block|boost)/\?", page)
    found = operator.get(EXPLAIN, {"id": f"user:{customer.pk}"})
    assert found["Location"] == f"{EXPLAIN}?user={customer.pk}"
    links = re.findall(r"(?:block/\?caller|boost/\?user)=([^\"&]*)", words_of(operator.get(found["Location"])))
    assert set(links) == {f"user%3A{customer.pk}", f"{customer.pk}"}


def test_pasted_lines_are_refused(operator: Client, customer: User, text: str, refusal: str) -> None:
    plan, bots = Plan.objects.create(name="Pro", slug="pro"), SubjectList.objects.create(name="Bots")
    for page in (f"plan/{plan.pk}/assign", f"subjectlist/{bots.pk}/add-members"):
        path = f"{ADMIN}/{page}/"
        assert f"Line 1, “{text}”: {refusal}" in words_of(operator.post(path, {"text": text}))
        assert operator.post(path, {"text": f"user:{customer.pk}"}).status_code == 302
    assert [row.user for model in (PlanAssignment, ListMember) for row in model.objects.all()] == [customer] * 2


@pytest.mark.parametrize("verb", ["explain", "reset", "boost", "block", "export-subject", "forget --yes"])
def test_commands_are_refused(customer: User, text: str, refusal: str, verb: str) -> None:
    RatePolicy.objects.create(rates="5/hour")
    with pytest.raises(CommandError, match=re.escape(refusal)):
        run(*verb.split(), "--user", text)


def test_a_key_with_its_kind_is_always_the_key(customer: User) -> None:
    User.objects.create(username=f"user:{customer.pk}")
    assert f"user:{customer.pk} (bigco)" in run("block", "--user", f"user:{customer.pk}")


def test_one_account_may_be_found_in_several_ways(customer: User) -> None:
    customer.username = customer.email
    customer.save()
    both = {f"user:{customer.pk}": customer.email}
    texts = [customer.email, str(customer.pk), f"user:{customer.pk}", "nobody", "a\x00b", "", "user:nobody"]
    with CaptureQueriesContext(connection) as queries:
        assert find_accounts(texts) == dict.fromkeys(texts[:3], both)
    assert len(queries) == 1


def test_names_that_are_stored_alike(client: Client, settings: Any, checkpointing: None) -> None:
    """What databases refuse was escaped, and then equal to a name that was written so."""
    identifiers = {"IDENTIFIERS": {"api_key": "tests.project.views.api_key"}}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **identifiers}
    RatePolicy.objects.create(rates="10/month", counted_per="api_key")
    names = ("x" * 300, "z\0", "z\\0", "z\\x00", "z\ud800", "z\\ud800", "z\\", "z\\\\", "y" * 198)
    names += tuple(short(name) for name in names[:2])  # digests as a client could write them
    for name in names:
        check_request(request_from(headers={"X-Api-Key": name}))
    flush()
    for name in names:
        rows = client.get("/quota/usage/history/", headers={"X-Api-Key": name}).json()["results"]
        assert [(row["used"], row["counted_per"]) for row in rows] == [(1, "api_key")], name
