"""Telling operators of a save: the text, the mail and the webhook, on a thread that delays no save."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import django
import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.db import transaction

from django_ratequota import notify
from django_ratequota.models import Plan, PolicyChange, RatePolicy
from django_ratequota.notify import change_text, mail_operators, post_to
from django_ratequota.recording.recorder import record_publication, recorded_as
from django_ratequota.signals import policies_changed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture(autouse=True)
def managers(settings: Any) -> Iterator[None]:
    # Django 6.0 deprecates pairs, and earlier versions take nothing else. Django 6.1 deprecates mail without MAILERS.
    settings.MANAGERS = ["ops@example.com"] if django.VERSION >= (6, 0) else [("Ops", "ops@example.com")]
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    yield
    policies_changed.disconnect(mail_operators)
    notify._clear()


def join() -> None:
    """Wait until everything is sent."""
    for thread in threading.enumerate():
        if thread.name == "ratequota-notify":
            thread.join()


def test_a_mail_has_the_values_before_and_after(free: Plan, alice: User) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    policy = RatePolicy.objects.create(plan=free, rates="10/min", reason="A trial")
    policies_changed.connect(mail_operators)
    with recorded_as(alice, "Ticket 4711"), transaction.atomic():
        RatePolicy.objects.filter(pk=policy.pk).update(rates="20/min", plan=pro, reason="")
        RatePolicy.objects.create(rates="1/s")
    join()
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
        "  reason: A trial → empty",
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


def test_hostile_names_break_no_header() -> None:
    Plan.objects.create(name="a\nBcc: b@example.com\u202e", slug="a")
    subject, text = change_text(PolicyChange.objects.all(), None, "x\u202e")
    assert subject == "Rate limits: plan created: a Bcc: b@example.com\\u202e"
    assert "\u202e" not in text
    record_publication("by hand")
    assert change_text(PolicyChange.objects.all(), None, "")[0] == "Rate limits: published and 1 more"


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any], threading.Event]]:
    """The address of a server, what was posted to it, and the event that it waits for before it answers."""
    posted: list[Any] = []
    go = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            go.wait()
            self.send_response(500 if self.path.endswith("secret-broken") else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", posted, go
    go.set()
    join()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_that_does_not_answer_delays_no_save(webhook: tuple[str, list[Any], threading.Event]) -> None:
    url, posted, go = webhook
    receiver = post_to(url)
    policies_changed.connect(receiver)
    try:
        Plan.objects.create(name="Free", slug="free")
        Plan.objects.create(name="Pro", slug="pro")
    finally:
        policies_changed.disconnect(receiver)
    assert not go.is_set(), "both are saved, and neither is answered"
    go.set()
    join()
    titles = [one["text"].splitlines()[0] for one in posted]
    assert titles == ["Rate limits: plan created: Free", "Rate limits: plan created: Pro"]


def test_a_failure_is_logged_without_the_address(
    webhook: tuple[str, list[Any], threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    url, _posted, go = webhook
    go.set()
    receiver = post_to(f"{url}secret-broken")
    policies_changed.connect(receiver)
    try:
        Plan.objects.create(name="Free", slug="free")
    finally:
        policies_changed.disconnect(receiver)
    join()
    assert [record.getMessage() for record in caplog.records if record.name == "django_ratequota"] == [
        "a notification of a policy change was not sent: HTTPError"
    ]
    assert "secret" not in caplog.text


def test_a_server_that_never_answers_holds_a_bounded_number(
    webhook: tuple[str, list[Any], threading.Event], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, posted, go = webhook
    monkeypatch.setattr(notify, "_MOST_WAITING", 2)
    receiver = post_to(url)
    policies_changed.connect(receiver)
    try:
        for number in range(5):
            Plan.objects.create(name=f"P{number}", slug=f"p{number}")
    finally:
        policies_changed.disconnect(receiver)
    go.set()
    join()
    assert 2 <= len(posted) <= 3
    assert "was dropped: 2 are waiting already" in caplog.text


def test_post_to_refuses_other_addresses() -> None:
    with pytest.raises(ValueError, match="write the webhook's whole address"):
        post_to("file:///etc/passwd")


def test_a_process_ends_after_it_has_sent(webhook: tuple[str, list[Any], threading.Event]) -> None:
    """A daemon thread would end with the command, and nobody would hear of an import."""
    url, posted, go = webhook
    code = f"""
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"])
django.setup()
from django_ratequota import notify
from urllib.request import Request
notify._send_later(lambda: notify._post(Request({url!r}, b'"hello"')))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        go.set()
        assert process.wait() == 0
    assert posted == ["hello"]
