"""Policies for subject lists: at requests, by dates, in other processes' snapshots, and in Explain."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_address, ip_network
from random import Random
from typing import Any

import pytest
from django.utils import timezone

from django_ratequota.models import ListMember, RatePolicy, SubjectList
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.audience_index import Members
from django_ratequota.policies.facts import member_facts
from django_ratequota.policies.requests.caller import DescribedCaller
from tests.support.properties import thorough_after
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def bots() -> SubjectList:
    return SubjectList.objects.create(name="Bad bots")


def test_explain_names_the_list_and_the_entry(bots: SubjectList) -> None:
    RatePolicy.objects.create(subject_list=bots, rates="2/s")
    caller = DescribedCaller(user_id=None, address="203.0.113.9")

    def reason() -> str:
        [candidate] = explain_caller(caller, scope=None).candidates
        return candidate.reason

    explanation = explain_caller(caller, scope=None)
    assert (explanation.candidates, dict(explanation.others)) == ((), {"list": 1})
    member = ListMember.objects.create(
        subject_list=bots, subject="ip:203.0.113.0/24", ends_at=timezone.now() - timedelta(hours=1)
    )
    assert reason() == "lost: the customer's entry in the list Bad bots has ended or has not started yet"
    RatePolicy.objects.update(mode="off")
    assert reason() == "lost: it is switched off"
    RatePolicy.objects.update(mode="enforce")
    member.ends_at = None
    member.save()
    assert reason() == "wins: the list is the most specific audience here; the list Bad bots has ip:203.0.113.0/24"


def test_explain_lists_the_entries_by_kind(bots: SubjectList, settings: Any) -> None:
    """In each process they had another order."""
    kinds = ["api_key", "region", "tenant", "zone"]
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": dict.fromkeys(kinds, "tests.project.views.api_key"),
    }
    for kind in kinds:
        ListMember.objects.create(subject_list=bots, subject=f"{kind}:a")
    RatePolicy.objects.create(subject_list=bots, rates="2/s")
    caller = DescribedCaller(user_id=None, address="203.0.113.9", identifiers=dict.fromkeys(kinds, "a"))
    [candidate] = explain_caller(caller, scope=None).candidates
    assert candidate.reason.endswith("has api_key:a, region:a, tenant:a, zone:a")


asked: list[str] = []


def tenant(request: Any) -> str:
    asked.append(request.path)
    return "acme"


def test_lists_without_a_policy_call_no_identifier(bots: SubjectList, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": f"{__name__}.tenant"}}
    ListMember.objects.create(subject_list=bots, subject="tenant:acme")
    asked.clear()
    RatePolicy.objects.create(rates="5/s")
    assert [status.limit for status in check_from().statuses] == [5]
    assert not asked
    RatePolicy.objects.create(subject_list=bots, rates="6/s")
    assert [status.limit for status in check_from().statuses] == [6]
    assert asked


VALUES = """
203.0.113.7 203.0.113.7/32 203.0.113.0/24 203.0.113.7/24 203.0.113.0/024 203.0.113.0/255.255.255.0 0.0.0.0/0
1.2.3.4/33 1.2.3.4/ 1.2.3.4/-1 1.2.3 01.2.3.4 1.2.3.4\0 \ud800 here 2001:db8::/32 2001:db8::1 2001:db8::1/32
"""


def test_a_member_has_the_network_that_python_reads() -> None:
    for value in ["", *VALUES.split()]:
        try:
            network = ip_network(value)
        except ValueError:  # matches nobody
            expected: Any = f"ip:{value}"
        else:
            hosts = network.max_prefixlen - network.prefixlen
            expected = (network.max_prefixlen, hosts, int(network.network_address) >> hosts)
        assert member_facts(1, 1, None, f"ip:{value}", None, None).key == expected, value


@pytest.mark.parametrize("seed", thorough_after(1, range(5)))
def test_the_index_finds_what_a_search_of_all_networks_finds(seed: int) -> None:
    random = Random(seed)

    def network() -> str:
        bits = random.choice([32, 128])
        prefix = random.randint(0, bits)
        number = random.getrandbits(6) << (bits - 6) >> (bits - prefix) << (bits - prefix)
        kind = type(ip_address("::" if bits == 128 else "0.0.0.0"))
        return f"ip:{kind(number)}/{prefix}"

    members, rows = Members(), {}
    for _ in range(30):
        changed: dict[int, Any] = {random.randrange(200): None for _ in range(5)}
        changed |= {pk: member_facts(pk, 1, None, network(), None, None) for pk in random.sample(range(200), 10)}
        members = members.changed(changed)
        rows = {pk: row for pk, row in {**rows, **changed}.items() if row is not None}
        for _ in range(10):
            subject = str(random.choice(list(rows.values()))).removeprefix("ip:")
            address = ip_network(subject)[random.choice([0, -1])]
            expected = sorted(pk for pk, row in rows.items() if address in ip_network(str(row)[3:]))
            assert sorted(member.id for member in members.containing(address)) == expected
        assert len(members) == len(rows)
