"""Rolling out a limit: what a log-only policy would have refused is a click away from its row and from its form."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client

from django_ratequota import check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from tests.project.views import request_from
from tests.support.operators import text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

LIST = "/admin/django_ratequota/ratepolicy/"


def test_a_log_only_policy_leads_to_what_it_would_have_refused(
    operator: Client, redis_client: Any, search: Endpoint
) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="1/day", mode="log")
    for _ in range(3):
        check_request(request_from(address="203.0.113.7"), scope="search")
    collector.flush()
    link = re.search(r'href="([^"]*)">Log-only refusals</a>', text_of(operator.get(LIST)))
    assert link is not None
    assert f'href="{link[1]}"' in text_of(operator.get(f"{LIST}{policy.pk}/change/"))
    page = text_of(operator.get(html.unescape(link[1])))
    refusals = page[page.index('<section aria-labelledby="ratequota-refusals">') :]
    [row] = re.findall(r"<tr>\s*<th scope=\"row\">.*?</tr>", refusals, re.S)
    for text in (" (log only)<", ">2<", "ip:203.0.113.7", "GET search"):
        assert text in row
