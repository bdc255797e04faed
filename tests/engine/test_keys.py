"""Redis keys: readable where that is safe, short whatever the text, and never shared by two counters."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.keys import bucket_key, check_prefix, revision_key, short
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import InvalidBucket
from tests.support.properties import examples

EXAMPLES = examples(500)
MINUTE = Rate.parse("100/min")

#: Text that keys are made of, and text at large: braces, NUL, lone surrogates.
AWKWARD = st.text(alphabet="{}:~.\0\n \ud800\udfffé٣user:ip0123", max_size=12)
TEXT = (
    AWKWARD
    | st.text(st.characters(codec=None), max_size=60)
    | st.sampled_from(["everyone", "user:1", "user:1 ", "user:1\n", "USER:1", "user:", "ip:::1", "plan:3", "\0"])
    | st.builds("{}:{}".format, st.sampled_from(["user", "ip", "plan", "api_key", "tenant"]), AWKWARD)
)
RATES = st.builds(
    lambda algorithm, period: Rate(limit=5, period=period, algorithm=algorithm),
    st.sampled_from(ALGORITHMS),
    st.sampled_from([0.001, 0.06, 1, 60, 60.000001, 3600, 86_400, 3653 * 86_400]),
) | st.just(Rate(limit=5, period="month"))
BUCKETS = st.builds(
    Bucket,
    TEXT,
    RATES,
    scope=TEXT,
    endpoint_id=st.none() | st.integers(1, 2**63 - 1),
    counted_per=TEXT | st.sampled_from(["", "caller", "ip", "plan", "everyone", "tenant"]),
)


@pytest.mark.parametrize(
    ("bucket", "key"),
    [
        (Bucket("user:42", MINUTE), "rq:{user:42}:0:tb60"),
        (Bucket("user:42", MINUTE, scope="search"), "rq:{user:42}:search:tb60"),
        (Bucket("user:42", MINUTE, scope="search", endpoint_id=7), "rq:{user:42}:7:tb60"),
        (Bucket("user:0b6ef2f0-1d5c-4d2b-9d6b-0d0f6f1b7a3e", MINUTE), None),
        (Bucket("plan:3", Rate.parse("5/month")), "rq:{plan:3}:0:fwmonth"),
        (Bucket("everyone", Rate.parse("5/30day gcra")), "rq:{everyone}:0:gc2592000"),
        (Bucket("ip:203.0.113.7", Rate.parse("5/h leaky_bucket")), "rq:{ip:203.0.113.7}:0:lb3600"),
        (Bucket("user:1", Rate.parse("5/h leaky_bucket"), queued=True), "rq:{user:1}:0:queue"),
        (Bucket("ip:2001:db8:1:2::/64", MINUTE), "rq:{ip:2001:db8:1:2::/64}:0:tb60"),
        (Bucket("ip:2001:0db8:85a3:0000:0000:8a2e:0370:7334/128", MINUTE), None),
        (Bucket("user:1", Rate.parse("5/s sliding_window_log")), "rq:{user:1}:0:sl1"),
        (Bucket("user:1", Rate.parse("5/s sliding_window_counter")), "rq:{user:1}:0:sc1"),
        (Bucket("user:1", Rate(limit=5, period=0.5)), "rq:{user:1}:0:tb500000us"),
        (Bucket("ip:203.0.113.7", MINUTE, counted_per="ip"), "rq:{ip:203.0.113.7}:0.ip:tb60"),
        (Bucket("ip:203.0.113.7", MINUTE, counted_per="caller"), "rq:{ip:203.0.113.7}:0:tb60"),
    ],
)
def test_users_plans_and_addresses_stay_readable(bucket: Bucket, key: str | None) -> None:
    assert bucket_key("rq", bucket) == (key or f"rq:{{{bucket.subject}}}:0:tb60")


def test_text_chosen_by_clients_is_hashed() -> None:
    for kind, secret in itertools.product(("api_key", "header"), ("sk_live_51H8xQ2eZvKYlo2C", "4242", "user:42")):
        key = bucket_key("rq", Bucket(f"{kind}:{secret}", MINUTE))
        assert secret not in key
        assert key.startswith(f"rq:{{{kind}:~")
    for subject in ("sk_live_51H8xQ2eZvKYlo2C", "", "Everyone", "user:", "user:a b", "user:a}b"):
        key = bucket_key("rq", Bucket(subject, MINUTE))
        assert ":~" in key
        assert f"{{{subject}}}" not in key


@given(bucket=BUCKETS)
@EXAMPLES
def test_any_text_makes_a_short_ascii_key_with_one_hash_tag(bucket: Bucket) -> None:
    key = bucket_key("rq", bucket)
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key
    assert len(key) <= 128
    assert key.count("{") == key.count("}") == 1
    assert key != revision_key("rq")


def test_the_longest_parts_together_stay_below_128_bytes() -> None:
    """Each part was short, but all together took 144 bytes. keys.py decides which text stays readable."""

    def key(
        subject: str = "", scope: str = "", endpoint_id: int | None = None, per: str = "", rate: Rate = MINUTE
    ) -> str:
        bucket = Bucket(subject, rate, scope=scope, endpoint_id=endpoint_id, counted_per=per)
        return bucket_key("p" * 16, bucket)

    subjects = [f"user:{'u' * n}" for n in range(60)] + [f"{'a' * n}:x" for n in range(30)]
    subject = max(subjects, key=lambda text: len(key(subject=text)))
    scopes, pers = ["s" * n for n in range(60)], ["c" * n for n in range(40)]
    rates = [
        Rate(limit=5, period="month"),
        Rate(limit=5, period=3653 * 86_400, algorithm="gcra"),
        Rate(limit=5, period=3652 * 86_400 + 0.000001, algorithm="gcra"),
    ]
    made = [key(subject, *rest) for rest in itertools.product(scopes, [None, 2**63 - 1], pers, rates)]
    assert max(map(len, made)) <= 128, max(made, key=len)


@given(AWKWARD, AWKWARD)
def test_subjects_are_stored_one_to_one_and_as_every_database_can(one: str, other: str) -> None:
    stored = [short(f"tenant:{text}") for text in (one, other, f"{one}{'x' * 200}")]
    assert len(set(stored)) == 2 + (one != other)
    for text in stored:
        assert short(text) == text
        assert "\0" not in text.encode().decode()
        assert len(text) <= 200


@pytest.mark.parametrize("part", ["subject", "scope", "counted_per"])
def test_a_megabyte_of_anything_makes_a_short_key(part: str) -> None:
    for text in ("x" * 10**6, "\ud800" * 10**6, "\0" * 10**6, "é" * 10**6, "user:" + "1" * 10**6):
        assert len(bucket_key("p" * 16, replace(Bucket("user:1", MINUTE), **{part: text}))) <= 128


def counter(bucket: Bucket) -> tuple[object, ...]:
    """A counter's identity, computed another way."""
    endpoint: object = bucket.endpoint_id
    if endpoint is None:
        endpoint = bucket.scope
    per = "" if bucket.counted_per in ("caller", "plan", "everyone") else bucket.counted_per
    return bucket.subject, endpoint, per, bucket.rate.algorithm, bucket.rate.period_us, bucket.rate.period == "month"


@given(one=BUCKETS, other=BUCKETS)
@EXAMPLES
def test_two_counters_never_share_a_key(one: Bucket, other: Bucket) -> None:
    assert (bucket_key("rq", one) == bucket_key("rq", other)) == (counter(one) == counter(other))


@given(bucket=BUCKETS)
@EXAMPLES
def test_a_part_s_digest_is_not_that_part(bucket: Bucket) -> None:
    """Text that looks like a hash would share the hashed text's counter."""
    key = bucket_key("rq", bucket)
    subject = key[key.index("{") + 1 : key.index("}")]
    endpoint = key[key.index("}") + 2 :].rpartition(":")[0]
    for posing in (replace(bucket, subject=subject), replace(bucket, scope=endpoint, endpoint_id=None)):
        assert (bucket_key("rq", posing) == key) == (counter(posing) == counter(bucket))


@pytest.mark.parametrize("part", ["subject", "scope", "counted_per"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("x" * 10**6 + "a", "x" * 10**6 + "b"), ("\ud800", "\ud801"), ("\0", "\0\0"), ("é", "e\u0301"), ("?", "\udfff")],
    ids=["at the end", "surrogates", "NUL", "accents", "what replaces"],
)
def test_texts_that_differ_anywhere_are_two_counters(part: str, one: str, other: str) -> None:
    keys = {bucket_key("rq", replace(Bucket("user:1", MINUTE), **{part: text})) for text in (one, other)}
    assert len(keys) == 2


def test_what_keeps_its_counter_and_what_has_its_own() -> None:
    by_id, renamed = (Bucket("user:1", MINUTE, scope=scope, endpoint_id=7) for scope in ("search", "find"))
    edited = replace(by_id, rate=Rate.parse("200/min burst 7"), policy_id=2, mode="log", name="mine", on_error="deny")
    assert bucket_key("rq", by_id) == bucket_key("rq", renamed) == bucket_key("rq", edited)
    assert bucket_key("rq", by_id) != bucket_key("rq", Bucket("user:1", MINUTE, scope="7"))


@pytest.mark.parametrize("prefix", ["rq", "a", "prod:api-1.x_Y", "p" * 16])
def test_prefixes(prefix: str) -> None:
    assert check_prefix(prefix) == prefix
    assert bucket_key(prefix, Bucket("user:1", MINUTE)).startswith(f"{prefix}:{{user:1}}")


@pytest.mark.parametrize("prefix", ["", " ", "p" * 17, "a{b}", "a b", "é", "a\n", "\0", "a/b", "a*", None, 5, b"rq"])
def test_bad_prefixes(redis_client: redis.Redis, prefix: Any) -> None:
    with pytest.raises(InvalidBucket, match="PREFIX must be 1 to 16 ASCII letters"):
        check_prefix(prefix)
    if prefix:
        with pytest.raises(InvalidBucket, match="PREFIX must be 1 to 16 ASCII letters"):
            Limiter(client=redis_client, prefix=prefix)
