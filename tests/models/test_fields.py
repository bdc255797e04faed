"""Rates and subjects are stored in canonical form by every kind of write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Case, Value, When
from django.db.models.functions import Concat

from django_ratequota.engine.rates import MAX_TEXT
from django_ratequota.models import PolicyChange, RatePolicy
from django_ratequota.models.fields import RatesField

WRITTEN, CANONICAL = " 1_000 / 60 sec BURST 50 , 5/2Weeks GCRA", "1000/min burst 50, 5/2week gcra"
#: Two rates of the same algorithm and period, if the policy's algorithm is gcra.
TWO_RATES = "10/min gcra, 20/min"


def stored() -> list[str]:
    """Return the stored text, read with SQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT rates FROM django_ratequota_ratepolicy ORDER BY id")
        return [row[0] for row in cursor.fetchall()]


def test_canonical_text_longer_than_the_column_is_refused() -> None:
    """Canonical text is longer where units were abbreviated; PostgreSQL would fail the save."""
    text = ",".join(f"{number}/{number}m" for number in range(10, 46))
    assert len(text) <= MAX_TEXT
    with pytest.raises(ValidationError, match=f"at most {MAX_TEXT} characters"):
        RatesField().clean(text, None)


def _save(written: str, policy: RatePolicy) -> None:
    policy.rates = written
    policy.save(update_fields=["rates"])


def _update_by_case(written: str, policy: RatePolicy) -> None:
    field = RatePolicy._meta.get_field("rates")
    RatePolicy.objects.update(rates=Case(When(pk__gt=0, then=Value(written, output_field=field)), output_field=field))


def _bulk_update(written: str, policy: RatePolicy) -> None:
    policy.rates = written
    RatePolicy.objects.bulk_update([policy], ["rates"])


#: Ways to write rates, given a stored policy that the first two do not need.
WRITES: dict[str, Callable[[str, RatePolicy], Any]] = {
    "create": lambda written, policy: RatePolicy.objects.create(
        rates=written, algorithm=policy.algorithm, counted_per="ip"
    ),
    "bulk_create": lambda written, policy: RatePolicy.objects.bulk_create(
        [RatePolicy(rates=written, algorithm=policy.algorithm, counted_per="ip")]
    ),
    "save": _save,
    "update": lambda written, policy: RatePolicy.objects.update(rates=written),
    "update by Case": _update_by_case,
    "bulk_update": _bulk_update,
    "update_or_create": lambda written, policy: RatePolicy.objects.update_or_create(
        counted_per="caller", defaults={"rates": written}
    ),
}
by_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@pytest.mark.django_db
@by_write
def test_every_write_stores_canonical_text(write: Callable[[str, RatePolicy], Any]) -> None:
    write(WRITTEN, RatePolicy.objects.create(rates="1/s"))
    assert stored()[-1] == CANONICAL


@pytest.mark.django_db
@by_write
def test_every_write_refuses_rates_that_nobody_can_read(write: Callable[[str, RatePolicy], Any]) -> None:
    """They used to be stored, and limited nobody."""
    policy = RatePolicy.objects.create(rates="1/s", algorithm="gcra")
    for text, message in (("ten a minute", "at character 1"), ("", "cannot be blank"), (TWO_RATES, "same algorithm")):
        with pytest.raises(ValidationError, match=message), transaction.atomic():
            write(text, policy)
        assert stored() == ["1/s"]
    assert PolicyChange.objects.count() == 1


@pytest.mark.django_db
def test_an_algorithm_or_an_expression_that_the_stored_rates_contradict_is_refused() -> None:
    policy = RatePolicy.objects.create(rates=TWO_RATES)
    policy.algorithm = "gcra"
    for write in (
        lambda: policy.save(update_fields=["algorithm"]),
        lambda: RatePolicy.objects.update(algorithm="gcra"),
        lambda: RatePolicy.objects.update(rates=Concat("rates", Value(" or so"))),
    ):
        with pytest.raises(ValidationError) as caught, transaction.atomic():
            write()
        assert caught.value.code == "invalid_rate"
        assert stored() == [TWO_RATES]
    assert PolicyChange.objects.count() == 1


@pytest.mark.django_db
def test_lookups_accept_any_spelling() -> None:
    policy = RatePolicy.objects.create(rates=CANONICAL)
    assert RatePolicy.objects.get(rates=WRITTEN) == policy
    assert RatePolicy.objects.get(rates__in=[WRITTEN, "2/s"]) == policy
    assert not RatePolicy.objects.exclude(rates=WRITTEN).exists()


@pytest.mark.django_db
def test_a_row_with_unreadable_rates_is_found_by_its_text() -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'ten a day'")
    assert RatePolicy.objects.get(rates="ten a day") == policy
    RatePolicy.objects.filter(rates="ten a day").update(mode="off")
    policy.refresh_from_db()
    assert (policy.mode, policy.rates) == ("off", "ten a day")


@pytest.mark.django_db
@pytest.mark.parametrize("written", ["203.0.113.0/24", " ip:203.0.113.0/24 ", "ip:::ffff:203.0.113.0/120"])
def test_every_write_stores_the_canonical_subject(written: str) -> None:
    policy = RatePolicy.objects.create(subject=written, rates="blocked")
    [other] = RatePolicy.objects.bulk_create([RatePolicy(subject=written, rates="blocked", counted_per="ip")])
    assert policy.subject == other.subject == "ip:203.0.113.0/24"

    def bulk_update() -> None:
        policy.subject = other.subject = written
        RatePolicy.objects.bulk_update([policy, other], ["subject"])

    for write in (lambda: None, lambda: RatePolicy.objects.update(subject=written), bulk_update):
        write()
        assert set(RatePolicy.objects.values_list("subject", flat=True)) == {"ip:203.0.113.0/24"}
        RatePolicy.objects.update(subject="ip:198.51.100.7")
    assert RatePolicy.objects.create(subject="customer:7", rates="1/min").subject == "customer:7", "of no known kind"
    assert RatePolicy.objects.filter(subject__startswith="cust").exists()
