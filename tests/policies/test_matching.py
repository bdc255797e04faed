"""What competes where is found the same way each time, and remembered without growing by what clients write."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.policies.facts import NOBODY, EndpointFacts, UserEntry
from django_ratequota.policies.matching import Where, match_endpoints
from django_ratequota.policies.resolver import match_policies
from tests.policies.test_resolver import picture
from tests.support.properties import examples


def endpoint(number: int, routes: str = "", methods: str = "", cost: int = 1) -> EndpointFacts:
    return EndpointFacts(
        id=number, name=f"e{number}", routes=tuple(routes.split()), methods=frozenset(methods.split()), cost=cost
    )


@given(st.text("*ab/[", max_size=8), st.text("ab/[\n", max_size=8))
@examples(2000)
def test_globs_say_what_regular_expressions_would(pattern: str, text: str) -> None:
    expected = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch(text) is not None
    snapshot = picture([EndpointFacts(id=1, name="x", routes=(pattern,), methods=frozenset(), cost=1)])
    where = {"route": text, "name": None} if pattern.startswith("/") else {"route": None, "name": text}
    assert bool(match_endpoints(snapshot, Where(scope=None, method="GET", **where))) is expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "e1", "e2", "e3", "made up", "made up too"]),
            st.sampled_from([None, "/a/", "/b/", "/a/b/"]),
            st.sampled_from([None, "a", "v1:b"]),
            st.sampled_from(["GET", "HEAD", "POST", "OPTIONS", "BREW", "TEAPOT", ""]),
        ),
        max_size=30,
    )
)
@examples(200)
def test_endpoints_are_the_same_as_without_remembering(asked: list[tuple[Any, Any, Any, str]]) -> None:
    endpoints = [
        endpoint(1, "/a/*"),
        endpoint(2, "/a/ v1:*", "POST BREW"),
        endpoint(3, "/b/ a", "GET OPTIONS"),
        endpoint(4, "*"),
    ]
    snapshot = picture(endpoints)
    for scope, route, name, method in asked:
        question = {"scope": scope, "route": route, "name": name, "method": method}
        assert match_endpoints(snapshot, Where(**question)) == match_endpoints(picture(endpoints), Where(**question))


def test_made_up_scopes_and_methods_fill_no_memo() -> None:
    snapshot = picture([endpoint(1, "/a/", "POST"), endpoint(2, "/a/")])
    found = {
        match_endpoints(snapshot, Where(f"tenant {n}", route="/a/", name="a", method=f"BREW{n}", handling="none"))
        for n in range(50)
    }
    assert found == {(snapshot.endpoints[1], snapshot.endpoints[2])}
    assert len(snapshot.memo.endpoints) == 1
    for n in range(50):
        match_policies(snapshot, (snapshot.endpoints[2],), f"tenant {n}", NOBODY)
        match_policies(snapshot, (snapshot.endpoints[2],), None, UserEntry())
    assert len(snapshot.memo.policies) == 1
