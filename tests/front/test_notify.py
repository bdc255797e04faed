"""Notifications of saves and of limits that are nearly used up: text, mail and webhook, on a thread of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import django
import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.db import transaction

from django_ratequota import Bucket, BucketStatus, Rate, check_request
from django_ratequota.changes.writer import changed_by, write_publication
from django_ratequota.models import Plan, PolicyChange, RatePolicy
from django_ratequota.notify import (
    change_text,
    mail_customers,
    mail_operators,
    post_to,
    threshold_text,
    wait_until_sent,
)
from django_ratequota.signals import policies_changed, quota_threshold
from django_ratequota.testing import isolated
from tests.project.views import request_from
from tests.support.snippets import ROOT, snippet, snippets

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture(autouse=True)
def managers(settings: Any) -> Iterator[None]:
    # Django 6.0 deprecates pairs, and earlier versions take nothing else. Django 6.1 deprecates mail without MAILERS.
    settings.MANAGERS = ["ops@example.com"] if django.VERSION >= (6, 0) else [("Ops", "ops@example.com")]
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    yield
    wait_until_sent()


def test_a_mail_has_the_values_before_and_after(free: Plan, alice: User, connect: Connect) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    policy = RatePolicy.objects.create(plan=free, rates="10/min", reason="A trial")
    connect(mail_operators)
    with changed_by(alice, "Ticket 4711"), transaction.atomic():
        RatePolicy.objects.filter(pk=policy.pk).update(rates="20/min", plan=pro, reason="")
        RatePolicy.objects.create(rates="1/s")
    wait_until_sent()
    [sent] = mail.outbox
    assert sent.to == ["ops@example.com"]
    subject = "Rate limits: ratepolicy changed: plan Pro × all endpoints: 20/min and 1 more"
    assert sent.subject.endswith(subject)
    assert sent.body.splitlines() == [
        "By: alice",
        "Reason: Ticket 4711",
        "",
        "ratepolicy changed: plan Pro × all endpoints: 20/min",
        "  plan: Free → Pro",
        "  rates: 10/min → 20/min",
        "  note: A trial → empty",
        "ratepolicy created: everyone × all endpoints: 1/s",
    ]


def test_a_large_save_is_cut_and_counted(django_assert_max_num_queries: Any) -> None:
    Plan.objects.bulk_create([Plan(name=f"P{number}", slug=f"p{number}") for number in range(600)])
    with django_assert_max_num_queries(2):
        subject, text = change_text(PolicyChange.objects.order_by("pk"), None, "")
    assert subject == "Rate limits: plan created: P0 and 599 more"
    assert text.splitlines()[:4] == ["By: code or a command", "Reason: none", "", "plan created: P0"]
    assert text.splitlines()[-1] == "and 580 more"
    assert len(text.splitlines()) == 24


def test_names_that_forge_a_mail() -> None:
    """They had lines of their own in its text, such as another ``By:``."""
    hostile = "a\nBcc: b@example.com\u202e"
    plan = Plan.objects.create(name=hostile, slug="a")
    Plan.objects.filter(pk=plan.pk).update(description=hostile)
    subject, text = change_text(PolicyChange.objects.order_by("pk"), User(username=hostile), hostile)
    assert subject == "Rate limits: plan created: a\\nBcc: b@example.com\\u202e and 1 more"
    assert [line.split(":")[0] for line in text.split("\n")] == [
        *("By", "Reason", "", "plan created", "plan changed", "  description")
    ]
    assert text.replace("\n", "").isprintable()
    write_publication("by hand")
    assert change_text(PolicyChange.objects.all(), None, "")[0] == "Rate limits: published and 2 more"


Connect = Callable[[Any], None]


class Webhook(HTTPServer):
    """A server that keeps what is posted to it, and answers while ``go`` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        #: Headers and body of each request, and the bodies as JSON.
        self.received: list[tuple[Message, bytes]] = []
        self.posted: list[Any] = []
        #: The paths of other requests.
        self.fetched: list[str] = []
        self.go = threading.Event()
        self.go.set()


class Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.headers, body))
        self.server.posted.append(json.loads(body))
        self.server.go.wait()
        if self.path.endswith("redirects"):
            self.send_response(302)
            self.send_header("Location", "/inside")
        else:
            self.send_response(500 if self.path.endswith("secret-broken") else 200)
        self.end_headers()

    def do_GET(self) -> None:
        self.server.fetched.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go.set()
        wait_until_sent()
        server.shutdown()
        thread.join()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects a receiver to ``policies_changed`` for the time of the test."""
    with ExitStack() as connected:

        def connect(receiver: Any) -> None:
            policies_changed.connect(receiver)
            connected.callback(policies_changed.disconnect, receiver)

        yield connect


def test_a_webhook_that_does_not_answer_delays_no_save(webhook: Webhook, connect: Connect, caplog: Any) -> None:
    webhook.go.clear()
    connect(post_to(webhook.url))
    Plan.objects.create(name="Free", slug="free")
    Plan.objects.create(name="Pro", slug="pro")
    webhook.go.set()
    wait_until_sent()
    assert caplog.records == [], "both are saved before one is answered; a save that waits gives up"
    titles = [one["text"].splitlines()[0] for one in webhook.posted]
    assert titles == ["Rate limits: plan created: `Free`", "Rate limits: plan created: `Pro`"]


def test_the_address_of_a_webhook_in_logs(
    webhook: Webhook, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connect(post_to(f"{webhook.url}secret-broken"))
    Plan.objects.create(name="Free", slug="free")
    wait_until_sent()
    assert [record.getMessage() for record in caplog.records if record.name == "django_ratequota"] == [
        "a notification was not sent: HTTPError"
    ]
    assert "secret" not in caplog.text


def test_a_server_that_never_answers_holds_a_bounded_number(webhook: Webhook, caplog: Any) -> None:
    webhook.go.clear()
    receiver = post_to(webhook.url)
    for _ in range(103):
        post_threshold(receiver)
    webhook.go.set()
    wait_until_sent()
    assert 100 <= len(webhook.posted) <= 101
    assert "was dropped: 100 are waiting already" in caplog.text


@pytest.mark.slow
def test_a_process_ends_after_it_has_sent(webhook: Webhook) -> None:
    """A daemon thread would end with the command, and nobody would hear of an import."""
    code = f"""
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
)
django.setup()
from django_ratequota.models import PolicyChange
from django_ratequota.notify import post_to
post_to({webhook.url!r})(changes=PolicyChange.objects.none(), actor=None, reason="")
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert process.wait() == 0
    assert [one["text"].splitlines()[0] for one in webhook.posted] == ["Rate limits: policies changed"]


@pytest.mark.slow
def test_a_process_ends_after_it_has_sent_what_its_last_requests_reached(webhook: Webhook) -> None:
    """A command that ended within the second told nobody, or it had claimed the message and no thread sent it."""
    code = f"""
import threading
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"],
    RATEQUOTA={{"REDIS_URL": "memory://"}},
)
django.setup()
from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.monitoring import alerts
from django_ratequota.notify import post_to
from django_ratequota.signals import quota_threshold

alerts._SECONDS, first = 3600, threading.Event()
quota_threshold.connect(post_to({webhook.url!r}), weak=False)
quota_threshold.connect(lambda **_: first.set(), weak=False)
limiter, bucket = Limiter(), Bucket("user:1", Rate.parse("10/month"))
for number in range(1, 11):
    alerts.observe(limiter.check([bucket]), 1)
    assert number != 8 or first.wait(30)
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert ["80 %" in one["text"] for one in webhook.posted] == [True, False]


# --- Limits that are nearly used up. ---

PAGE = ROOT / "docs/howto/notifications.md"
AT = datetime(2026, 11, 21, 5, 20, tzinfo=UTC)
SECRET = "whsec_MjQgYnl0ZXMsIGJlc3QgYXQgcmFuZG9t"


def status_of(rate: str, used: int, reset_after_us: int = 4 * 10**6, debt: int = 0, **bucket: Any) -> BucketStatus:
    parsed = Rate.parse(rate)
    return BucketStatus(
        bucket=Bucket(**{"subject": "tenant:acme", "rate": parsed, **bucket}),
        allowed=True,
        remaining=parsed.limit - used,
        retry_after_us=0,
        reset_after_us=reset_after_us,
        window_us=60 * 10**6,
        debt=debt,
    )


def test_the_text_of_a_threshold(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TIME_ZONE": "Europe/Berlin"}
    month = status_of("1000000/month", 800_000, 826_800 * 10**6, policy_id=17, counted_per="tenant")
    assert threshold_text(80, month, AT, cost=1) == (
        "Rate limits: tenant:acme has used 80 % of all endpoints: 1000000/month per tenant",
        "Used: 800000 of 1000000\nThe window ends: 2026-11-30 20:00 CET\nPolicy: 17, counted per tenant",
    )
    log = status_of("10/min", 10, debt=2, scope="search", mode="log", subject="api_key:a\nBcc: b@example.com\u202e")
    assert threshold_text(100, log, AT, cost=1) == (
        "Rate limits: api_key:a\\nBcc: b@example.com\\u202e has used 100 % of search: 10/min (log only)",
        "Used: 12 of 10\nFull again: 2026-11-21 06:20 CET",
    )
    for mode, verb, mark in (("enforce", "was refused", ""), ("log", "would have been refused", " (log only)")):
        subject, _ = threshold_text(100, status_of("1000/month", 821, mode=mode), AT, cost=200)
        expected = f"a request of 200 by tenant:acme {verb} at 821 of all endpoints: 1000/month{mark}"
        assert subject == f"Rate limits: {expected}"


def fails(**_: Any) -> None:
    raise RuntimeError("mine")


def test_a_receiver_that_fails_keeps_no_other_from_its_signal(settings: Any, caplog: Any) -> None:
    paths = ["tests.front.test_notify.fails", "django_ratequota.notify.mail_operators"]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "NOTIFY": paths}
    quota_threshold.send_robust(None, level=80, status=status_of("5/month", 4), at=AT, cost=1)
    wait_until_sent()
    assert len(mail.outbox) == 1
    assert "tests.front.test_notify.fails, a receiver in RATEQUOTA['NOTIFY'], failed" in caplog.text


# --- Mails to customers. ---


def emails(subjects: list[str]) -> dict[str, str]:
    """CUSTOMER_EMAILS of these tests: Acme has an address, ``tenant:broken`` raises."""
    if "tenant:broken" in subjects:
        raise LookupError("no such customer")
    return {"tenant:acme": "billing@acme.example", "tenant:empty": ""}


def names(subjects: list[str]) -> dict[str, str]:
    return {"tenant:acme": "Acme & Söhne"}


@pytest.fixture
def tenants(settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "django_ratequota.identifiers.network"},
        "CUSTOMER_EMAILS": "tests.front.test_notify.emails",
        "SUBJECT_NAMES": "tests.front.test_notify.names",
        "NOTIFY": ["django_ratequota.notify.mail_customers"],
        "TIME_ZONE": "Europe/Berlin",
    }


def mailed(level: int, status: BucketStatus, cost: int = 1) -> list[Any]:
    mail.outbox.clear()
    mail_customers(level=level, status=status, at=AT, cost=cost, signal=quota_threshold)
    wait_until_sent()
    return mail.outbox


@pytest.mark.usefixtures("tenants")
def test_a_customer_is_mailed_what_is_used_and_when_it_is_free_again() -> None:
    [sent] = mailed(80, status_of("1000000 requests/month", 800_000, 826_800 * 10**6))
    assert (sent.to, sent.subject) == (["billing@acme.example"], "80 % of 1,000,000 requests per month used")
    assert sent.body.splitlines() == [
        "Hello Acme & Söhne,",
        "",
        "800,000 of 1,000,000 requests per month are used.",
        "The full limit is available again on Nov. 30, 2026, 8 p.m. CET.",
    ]
    [sent] = mailed(100, status_of("5/day fixed_window", 5, debt=2, scope="search"))
    assert sent.body.splitlines()[2:4] == [
        "7 of 5 units per day are used. Further requests are refused.",
        "The limit is for search.",
    ]
    [sent] = mailed(100, status_of("1000/week fixed_window", 821), cost=200)
    assert sent.subject == "A request was refused: 821 of 1,000 units per week used"
    assert "A request of 200 units was refused, because 821 of 1,000 units per week are used." in sent.body


@pytest.mark.usefixtures("tenants")
def test_the_pages_templates_tell_what_is_counted(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "django_ratequota/mail").mkdir(parents=True)
    for one in (one for one in snippets(PAGE) if one.language == "html"):
        file, text = one.text.split(" #}\n")
        (tmp_path / file.removeprefix("{# templates/")).write_text(text)
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    [sent] = mailed(100, status_of("1000/month", 821, scope="completions"), cost=200)
    assert sent.subject == "821 of 1,000 tokens used"
    assert sent.body.splitlines() == [
        "821 of 1,000 tokens are used.",
        "A request of 200 was refused.",
        "The whole limit is free again on Nov. 21, 2026, 6:20 a.m. CET.",
    ]
    assert mailed(80, status_of("10/month", 8, scope="exports"))[0].subject == "8 of 10 exports used"


@pytest.mark.usefixtures("tenants")
def test_a_shared_limit_and_one_that_refuses_nothing_are_nobodys(alice: User, caplog: Any) -> None:
    alice.email = "alice@example.com"
    alice.save()
    own, nobody = f"user:{alice.pk}", User.objects.create_user("nobody")
    assert [sent.to for sent in mailed(80, status_of("10/month", 8, subject=own))] == [["alice@example.com"]]
    assert mailed(80, status_of("10/month", 8, subject=own, mode="log")) == []
    shared = ["everyone", "plan:1", "ip:203.0.113.7", "tenant:"]
    without = ["tenant:empty", "tenant:other", f"user:{nobody.pk}", "user:0"]
    assert [one for one in shared + without if mailed(80, status_of("10/month", 8, subject=one))] == []
    assert caplog.text == ""
    for _ in range(2):
        assert mailed(80, status_of("10/month", 8, subject="tenant:broken")) == []
    assert caplog.text.count("tests.front.test_notify.emails failed: LookupError: no such customer") == 1


def test_a_customer_gets_one_mail_for_a_level_and_window(settings: Any, alice: User, tenants: None) -> None:
    User.objects.update(email="alice@example.com")
    policy = RatePolicy.objects.create(rates="5/month")
    with isolated():
        for rates in ("5/month", "5/month", "5/month", "5/month, 9/min", "4/month", "4/month"):
            RatePolicy.objects.filter(pk=policy.pk).update(rates=rates)
            check_request(request_from(alice))
    wait_until_sent()
    assert [sent.subject for sent in mail.outbox] == [
        "80 % of 5 units per month used",
        "100 % of 4 units per month used",
    ]


# --- Webhooks. ---


def post_threshold(receiver: Any, used: int = 8, **more: Any) -> None:
    status = status_of(more.pop("rate", "10/month"), used, **more)
    receiver(level=80, status=status, at=AT, cost=1, signal=quota_threshold)


@pytest.mark.parametrize("event", ["threshold", "save"])
def test_a_name_that_pings_a_chat(webhook: Webhook, connect: Connect, event: str) -> None:
    hostile = "<!channel> @here` [Click](https://evil)\n\n" + "x" * 200
    if event == "threshold":
        post_threshold(post_to(webhook.url), subject=f"user:{hostile}")
    else:
        connect(post_to(webhook.url))
        with changed_by(User.objects.create(username=hostile), hostile):
            Plan.objects.create(name=hostile, slug="a").delete()
    wait_until_sent()
    text = "\n".join(message["text"] for message in webhook.posted)
    assert not re.search("[<>]|@[a-z]", text)
    assert "&lt;!channel&gt; @\u200bhere' [Click]" in text
    outside = "".join(line.split("`", 1)[0] + line.rsplit("`", 1)[-1] for line in text.splitlines())
    assert "Click" not in outside
    assert all(line.count("`") % 2 == 0 for line in text.splitlines())


def test_a_webhook_that_redirects(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    post_threshold(post_to(f"{webhook.url}redirects"))
    wait_until_sent()
    assert (len(webhook.received), webhook.fetched) == (1, [])
    assert "a notification was not sent: HTTPError" in caplog.text


def test_a_signed_webhook_is_verified_as_the_page_shows(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, rf: Any
) -> None:
    hooks, views = ModuleType("billing.hooks"), ModuleType("billing.views")
    monkeypatch.setitem(sys.modules, "billing.hooks", hooks)
    exec(snippet(PAGE, "billing/hooks.py"), vars(hooks))
    exec(snippet(PAGE, "billing/views.py"), vars(views))
    post_threshold(post_to(webhook.url, vars(hooks)["SECRET"]), used=10, debt=3)
    wait_until_sent()
    [(headers, body)] = webhook.received
    [shown] = [json.loads(one.text) for one in snippets(PAGE) if one.language == "json"]
    assert {**shown, "data": list(shown["data"])} == {**webhook.posted[0], "data": list(webhook.posted[0]["data"])}
    data = webhook.posted[0]["data"]
    assert (data["used"], data["subject"], data["resets_at"]) == (13, "tenant:acme", "2026-11-21T05:20:04+00:00")

    def answer(body: bytes, **changed: str) -> int:
        sent = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
        names = {f"HTTP_WEBHOOK_{name.upper()}": value for name, value in changed.items()}
        request = rf.post("/", body, content_type="application/json", **{**sent, **names})
        return int(vars(views)["quota_hook"](request).status_code)

    assert answer(body) == 200
    old = str(int(time.time()) - 301)
    forged: list[tuple[bytes, dict[str, str]]] = [
        (body.replace(b"80", b"90"), {}),
        (body, {"id": "another"}),
        (body, {"signature": "v1,"}),
        (body, {"timestamp": old}),
        (body, {"timestamp": "x"}),
    ]
    assert [answer(changed, **more) for changed, more in forged] == [403] * len(forged)


def test_the_id_of_an_event_is_the_same_from_every_process(webhook: Webhook) -> None:
    receiver = post_to(webhook.url, SECRET)
    post_threshold(receiver, used=8)
    post_threshold(receiver, used=9, reset_after_us=5 * 10**6)  # noticed earlier by another clock
    post_threshold(receiver, subject="tenant:other")
    post_threshold(receiver, reset_after_us=10**12)  # the next window
    post_threshold(receiver, rate="9/month")  # after a downgrade
    wait_until_sent()
    first, second, *others = [headers["webhook-id"] for headers, _ in webhook.received]
    assert first == second
    assert len({first, *others}) == 4


def test_crossings_a_period_apart_are_two_events(webhook: Webhook) -> None:
    """A rate that refills reaches a level again, with the same time left or another."""
    receiver, minute = post_to(webhook.url, SECRET), timedelta(minutes=1)
    for at, left in ((AT + minute * 0.1, 60 * 10**6), (AT + minute * 1.1, 48 * 10**6)):
        receiver(level=80, status=status_of("10/min", 8, left), at=at, cost=1, signal=quota_threshold)
    wait_until_sent()
    assert len({headers["webhook-id"] for headers, _ in webhook.received}) == 2


def test_a_save_may_be_posted_signed(webhook: Webhook, connect: Connect) -> None:
    connect(post_to(webhook.url, SECRET))
    Plan.objects.create(name="Free", slug="free")
    wait_until_sent()
    [(headers, _)] = webhook.received
    assert webhook.posted[0]["type"] == "policies_changed"
    assert webhook.posted[0]["data"]["text"].startswith("Rate limits: plan created: Free")
    assert str(PolicyChange.objects.get().change_id) == headers["webhook-id"]


def test_other_addresses_and_a_secret_that_protects_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="write the webhook's whole address"):
        post_to("file:///etc/passwd")
    for secret in ("short", "whsec_", "whsec_c2hvcnQ=", "whsec_-YWJjYWJjYWJjYWJjYWJjYWJj"):
        with pytest.raises(ValueError, match="write a secret of 16 characters or more") as caught:
            post_to("https://example.com/hidden", secret)
        assert "hidden" not in str(caught.value)
        assert secret not in str(caught.value).replace("whsec_ and base64", "")
    post_to("https://example.com/", "sixteen letters.")
