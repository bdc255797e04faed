"""The suggested limits equal those of a search through all spans, and a replay at them refuses nobody below."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.operations.impact import estimate
from django_ratequota.operations.impact_audience import NotEstimable
from django_ratequota.operations.replay import replay
from django_ratequota.operations.spans import spread
from django_ratequota.operations.suggest import PERIODS, SHARES, peak, readable, sentences, suggest
from tests.operations.test_impact import START, record
from tests.support.operators import client_of, text_of
from tests.support.properties import examples

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("redis_client")]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Invent the records of a day."""

    def records(*rows: Attempts, share: float = 1.0) -> None:
        in_order = tuple(sorted(rows, key=lambda one: one.second))
        since = datetime.fromtimestamp(START, UTC) if rows else None
        usage = RecordedAttempts(attempts=in_order, share=share, since=since)
        monkeypatch.setattr(attempts, "recorded_attempts", lambda hours=24: usage)
        monkeypatch.setattr("django_ratequota.operations.suggest.time.time", lambda: START + 86_400)

    return records


RECORDS = st.lists(
    st.builds(
        record,
        second=st.integers(START, START + 5) | st.integers(START, START + 8000),
        caller=st.sampled_from([f"user:{number}" for number in range(30)]),
        endpoint_ids=st.sampled_from([(), (1,)]),
        cost=st.sampled_from([1, 1, 2, 13]),
        admitted=st.integers(0, 4),
        refused=st.integers(0, 2),
    ),
    min_size=1,
    max_size=60,
)


@examples(60)
@given(records=RECORDS, endpoint=st.sampled_from([None, 1]))
def test_suggestions_equal_a_search_through_all_spans(
    recorded: Any, records: list[Attempts], endpoint: int | None
) -> None:
    recorded(*records)
    Endpoint.objects.get_or_create(pk=1, defaults={"name": "search"})
    walks: dict[str, list[tuple[int, int]]] = {}
    for one in sorted(records, key=lambda one: one.second):
        count = one.admitted + one.refused
        if endpoint is None or endpoint in one.endpoint_ids:
            at = one.second * 10**6
            walks.setdefault(one.caller, []).extend((at + i * 10**6 // count, one.cost) for i in range(count))
    walks = {caller: walk for caller, walk in walks.items() if walk}
    found = suggest(RatePolicy(endpoint_id=endpoint), seconds=60)
    assert found.callers == len(walks)
    assert found.requests == sum(map(len, walks.values()))
    for row in found.rows:
        span = PERIODS[row.unit] * 10**6
        by_request = row.counts == "requests"
        peaks = sorted(
            max(sum(1 if by_request else cost for at, cost in walk if end - span < at <= end) for end, _cost in walk)
            for walk in walks.values()
        )
        assert row.peak == peaks[-1]
        for share, text in zip(SHARES, row.rates, strict=True):
            limit = Rate.parse(text).limit
            stay = sum(own <= limit for own in peaks)
            assert stay * 1000 >= share * len(peaks)
            lowest = next(own for own in peaks if sum(p <= own for p in peaks) * 1000 >= share * len(peaks))
            assert lowest <= limit <= max(20, lowest * 1.25)


@examples(150)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    period=st.sampled_from([1, 2, 60]),
    rows=st.lists(
        st.builds(
            record,
            second=st.integers(START, START + 5) | st.integers(START, START + 300),
            cost=st.sampled_from([1, 3]),
            admitted=st.integers(0, 4),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_a_limit_of_the_peak_refuses_nothing(algorithm: str, period: int, rows: list[Attempts]) -> None:
    walk = [(at, cost) for at, cost, _caller in spread(rows)]
    scale = Rate(limit=1, period=period, algorithm=algorithm)
    highest = peak(scale, walk)
    if highest:
        assert all(replay([Rate(limit=highest, period=period, algorithm=algorithm)], walk))


def test_the_impact_at_the_suggested_rate_is_as_promised(recorded: Any) -> None:
    recorded(*(record(START + number % 50, f"user:{number}", admitted=1 + number % 200) for number in range(1000)))
    found = suggest(RatePolicy())
    assert [row.unit for row in found.rows] == ["s", "min", "hour", "day"]
    assert {row.counts for row in found.rows} == {"units"}, "each request is one unit"
    for row in found.rows:
        for share, text in zip(SHARES, row.rates, strict=True):
            impact = estimate(RatePolicy(rates=text, algorithm="fixed_window"), seconds=60)
            assert impact.refused_clients <= (1000 - share) * impact.clients / 1000


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(1, 1), (20, 20), (21, 25), (87, 90), (100, 100), (101, 110), (123, 130), (2345, 2500), (96_001, 100_000)],
)
def test_limits_are_rounded_up_to_readable_numbers(value: int, rounded: int) -> None:
    assert readable(value) == rounded


def test_periods_longer_than_the_records_are_left_out(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(record())
    monkeypatch.setattr("django_ratequota.operations.suggest.time.time", lambda: START + 120)
    assert [row.unit for row in suggest(RatePolicy()).rows] == ["s", "min"]


def test_it_says_what_it_is_based_on(recorded: Any) -> None:
    recorded(*(record(caller=f"user:{number}", admitted=3) for number in range(10)), share=0.5)
    text = " ".join(sentences(suggest(RatePolicy())))
    assert "Based on 30 requests of 10 callers in the last 24 h." in text
    assert "This is an estimate from 50 % of the callers." in text
    assert "log only" in text
    bounded = suggest(RatePolicy(), most=10)
    assert (bounded.callers, bounded.share) == (3, 0.15)
    with pytest.raises(NotEstimable, match="shared"):
        suggest(RatePolicy(counted_per="everyone"))
    recorded(record(admitted=3))
    with pytest.raises(NotEstimable, match="more than 2 requests share one counter"):
        suggest(RatePolicy(), most=2)
    recorded()
    assert "no request was recorded" in sentences(suggest(RatePolicy()))[0]


def test_callers_with_a_policy_of_their_own_are_left_out(recorded: Any) -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", endpoint=search, rates="5/s")
    here: dict[str, Any] = {"endpoint_ids": (search.pk,)}
    recorded(
        record(**here, admitted=50), record(caller="user:2", ip="ip:198.51.100.1", **here), record(caller="user:3")
    )
    found = suggest(RatePolicy(endpoint=search))
    assert (found.callers, found.left_out_clients, found.rows[0].peak_caller) == (1, 1, "user:2")


# --- The fragment of the form, the page without scripts, and the command. ---

SUGGEST = "/admin/django_ratequota/ratepolicy/suggest/"


def test_the_form_asks_without_rates_and_gets_buttons(recorded: Any, fresh_policies: None) -> None:
    recorded(record(admitted=30), record(caller="user:2", admitted=3))
    client = client_of("add_ratepolicy")
    form = {"counted_per": "caller", "algorithm": "token_bucket", "mode": "log", "rates": ""}
    page = text_of(client.post(SUGGEST, form))
    assert 'data-rate="30/min"' in page
    assert "Based on 33 requests of 2 callers" in page
    assert "counted per" in text_of(client.post(SUGGEST, {**form, "counted_per": "nonsense"})).lower()
    assert client_of(name="nobody").post(SUGGEST, form).status_code == 403


def test_without_scripts_the_rates_are_shown_as_text(recorded: Any, fresh_policies: None) -> None:
    recorded(record(admitted=30))
    policy = RatePolicy.objects.create(rates="1/s", mode="log")
    page = text_of(client_of("view_ratepolicy").get(SUGGEST, {"object": policy.pk}))
    assert ">30/min</bdi>" in page
    assert "data-rate" not in page
    assert "Save the policy first." in text_of(client_of("add_ratepolicy", name="adder").get(SUGGEST))


def test_without_redis_nothing_is_suggested(fresh_policies: None, settings: Any) -> None:
    policy = RatePolicy.objects.create(rates="1/s")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 0.2}
    page = text_of(client_of("view_ratepolicy").get(SUGGEST, {"object": policy.pk}))
    assert "Redis did not answer" in page


def test_the_command_suggests(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    search = Endpoint.objects.create(name="search")
    recorded(record(endpoint_ids=(search.pk,), admitted=30))
    call_command("ratequota", "suggest", "--endpoint", "search")
    out = capsys.readouterr().out
    assert "30/min" in out
    assert "highest 30 (user:1)" in out
    for wrong, text in (
        (["--endpoint", "nowhere"], "no endpoint 'nowhere'"),
        (["--plan", "gold"], "no plan 'gold'"),
        (["--hours", "49"], "1 to 48"),
        (["--counted-per", "planet"], "choose caller"),
    ):
        with pytest.raises(CommandError, match=text):
            call_command("ratequota", "suggest", *wrong)
