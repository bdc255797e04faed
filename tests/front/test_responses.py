"""Refusals outside DRF: problem details, and the media type that the client prefers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from django.test import RequestFactory
from django.utils.html import escape

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.responses import problem, refusal_response, refusal_text, status_code


@pytest.fixture
def refused(limiter: Limiter) -> Decision:
    buckets = [Bucket("user:1", Rate.parse("2/min"), scope="search"), Bucket("user:1", Rate.parse("9/min"))]
    limiter.check(buckets, cost=2)
    return limiter.check(buckets)


def test_waits_are_in_units_that_people_count_in_and_never_too_short(refused: Decision) -> None:
    for seconds, words in {
        **{1: "1 second", 119: "119 seconds", 120: "2 minutes", 121: "3 minutes", 7199: "120 minutes"},
        **{7200: "2 hours", 172_799: "48 hours", 172_800: "2 days", 388_644: "5 days"},
    }.items():
        (status, other) = refused.statuses
        waiting = replace(refused, statuses=(replace(status, retry_after_us=seconds * 10**6), other))
        assert problem(waiting)["detail"] == f"Too many requests. Try again in {words}."
        assert problem(waiting)["retry_after"] == seconds


def test_a_block_is_no_outage() -> None:
    both = Decision(allowed=False, blocked_by=("all/blocked",), denied_by=("search/hour",), error="timeout")
    assert status_code(both) == 429
    assert refusal_text(both) == "Requests are blocked."


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, "application/problem+json"),
        ("*/*", "application/problem+json"),
        ("application/*", "application/problem+json"),
        ("application/json", "application/problem+json"),
        ("application/problem+json", "application/problem+json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html"),
        ("text/html", "text/html"),
        ("text/plain", "text/plain"),
        ("text/plain;q=0.5, text/html;q=0.9", "text/html"),
        ("text/html;q=0.1, application/json", "application/problem+json"),
        # what is not on offer, or makes no sense, gets the default
        ("image/png", "application/problem+json"),
        ("", "application/problem+json"),
        ("nonsense", "application/problem+json"),
        (";=,/;q=nonsense", "application/problem+json"),
    ],
)
def test_the_client_chooses_the_media_type(refused: Decision, accept: str | None, media_type: str) -> None:
    headers = None if accept is None else {"Accept": accept}
    response = refusal_response(RequestFactory().get("/", headers=headers), refused)
    assert response.status_code == 429
    charset = "; charset=utf-8" if media_type.startswith("text/") else ""  # as translations are seldom ASCII
    assert response["Content-Type"] == media_type + charset
    assert response["Vary"] == "Accept"
    assert response["Retry-After"] == "30"
    content = response.content.decode()
    if media_type == "application/problem+json":
        assert json.loads(content) == problem(refused)
    elif media_type == "text/html":
        assert content.startswith("<!doctype html>\n<html")  # test_templates tests the rest
        assert f"<p>{escape(refusal_text(refused))}</p>" in content
    else:
        assert content == "Too many requests. Try again in 30 seconds.\n"
