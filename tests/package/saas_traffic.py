"""Four months of traffic in the project that docs/howto/saas.md builds: every figure is that of a log of it.

``test_saas`` runs it there. Of the package's answers, the log has only which requests were charged.
"""

from __future__ import annotations

import csv
import io
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import redis
import time_machine
import yaml
from accounts.models import ApiKey, Membership, Organisation
from django.contrib.auth.models import User
from django.core import mail
from django.core.management import call_command
from django.db.models.functions import Now
from django.test import Client
from django.utils import timezone
from django.utils.formats import date_format
from mysite import views

from django_ratequota import Limiter, check_caller, notify
from django_ratequota.ledger import book
from django_ratequota.models import Endpoint, LedgerWriter, QuotaWindow
from django_ratequota.monitoring import alerts
from django_ratequota.operations.past_windows import by_day
from django_ratequota.quotas import assign
from django_ratequota.runtime import OncePerSettings, process
from tests.support import server
from tests.support.reference_models import begins_month

ZONE = ZoneInfo("Europe/Berlin")
BEGIN, END = datetime(2026, 1, 10, 9, tzinfo=ZONE), datetime(2026, 5, 16, 9, tzinfo=ZONE)
#: When a customer leaves a plan that nobody has cancelled.
NEVER = END + timedelta(days=99)
SIGN_UPS = {date(2026, 1, 15): "Globex AG", date(2026, 1, 31): "=Initech", date(2026, 2, 28): "Umbrella; Söhne"}
ADMIN = "/admin/django_ratequota/ratepolicy/"
#: What a request reserves.
COSTS = {"completions": views.Completions.throttle_cost, "exports": 1}


def same(found: Any, expected: Any) -> None:
    assert found == expected, f"{found} != {expected}"


def sums(rows: Iterable[tuple[Any, ...]]) -> dict[Any, int]:
    """What is last in the rows, added up by the rest of them; without zeros."""
    found: Counter[Any] = Counter()
    for *key, units in rows:
        found[tuple(key)] += int(units)
    return {key: units for key, units in found.items() if units}


def local_day(text: str) -> date:
    return datetime.fromisoformat(text).astimezone(ZONE).date()


class Customer:
    """An organisation and its clients: what it is on, and what it has used."""

    def __init__(self, row: Organisation) -> None:
        self.row, self.subject, self.anchor = row, f"organisation:{row.pk}", timezone.localdate().day
        self.plan, self.trial, self.is_warned = "free", BEGIN, False
        #: When the planned cancellation takes effect.
        self.leaves = NEVER
        #: Endpoint, first day of the month, plan, day, units.
        self.log: list[tuple[str, date, str, date, int]] = []
        who, key = {"username": f"user{row.pk}", "password": f"secret-{row.pk}"}, f"key-{row.pk}"
        user = User.objects.create_user(**who)
        Membership.objects.create(organisation=row, user=user)
        ApiKey.objects.create(organisation=row, user=user, digest=sha256(key.encode()).hexdigest())
        self.member, self.program = Client(raise_request_exception=False), Client(raise_request_exception=False)
        login = self.member.get("/usage/", follow=True)
        same(login.status_code, 200)
        same(self.member.post(login.redirect_chain[-1][0], who)["Location"], "/usage/")
        self.program.defaults["HTTP_X_API_KEY"] = key

    def plan_now(self) -> str:
        now = timezone.now()
        return "pro" if now < self.trial else "free" if now >= self.leaves else self.plan

    def month(self) -> date:
        day = timezone.localdate()
        while not begins_month(day, self.anchor):
            day -= timedelta(days=1)
        return day

    def month_ends(self) -> datetime:
        day = timezone.localdate() + timedelta(days=1)
        while not begins_month(day, self.anchor):
            day += timedelta(days=1)
        return datetime(day.year, day.month, day.day, tzinfo=ZONE)

    def note(self, endpoint: str, units: int, plan: str = "") -> None:
        self.log.append((endpoint, self.month(), plan or self.plan_now(), timezone.localdate(), units))

    def used(self, endpoint: str) -> int:
        month = self.month()
        return sum(entry[-1] for entry in self.log if entry[:2] == (endpoint, month))


class Traffic:
    """What customers and operators do, drawn by dice."""

    def __init__(self, clock: Any, seed: int) -> None:
        self.dice, self.clock, self.done = random.Random(seed), clock, Counter[str]()
        #: (plan, endpoint) -> units a month, and requests a minute: of each organisation has one person.
        self.limits: dict[tuple[str, str], tuple[int, int]] = {}
        per_member, *policies = yaml.safe_load(Path("policies.yaml").read_text())["policies"]
        self.per_member = int(per_member["rates"].removesuffix(" requests/min"))
        for one in policies:
            month, *minute = re.findall(r"(\d+)(?:/month| requests/min)", one["rates"])
            self.limits[one["plan"], one["endpoint"]] = int(month), self.per_member if minute else 10**9
        self.redis = redis.Redis.from_url(server.url())
        self.operator = Client()
        self.operator.force_login(User.objects.create(username="operator", is_staff=True, is_superuser=True))
        names: dict[str, Any] = {}
        exec(Path("shell.py").read_text(), names)
        self.customers = [Customer(names["acme"])]

    def run(self) -> None:
        rare = [self.buy, self.cancel, self.cancel_for_later, self.try_out, self.reset, self.lose_redis]
        rare.append(self.kill_worker)
        sign_ups = dict(SIGN_UPS)
        while timezone.now() < END:
            self.clock.shift(self.dice.choice([3600, 5 * 3600, 30 * 3600]))
            if sign_ups and timezone.localdate() >= min(sign_ups):
                self.sign_up(sign_ups.pop(min(sign_ups)))
            self.customer = self.dice.choice(self.customers)
            verb = self.dice.choice([*[self.requests] * 30, *rare])
            verb()
            self.done[verb.__name__] += 1
            if self.dice.random() < 0.2:
                self.compare()
        self.compare()
        self.work_for_two()
        assert all(self.done[verb.__name__] for verb in rare)
        assert self.done["refused"] > 10

    # What happens.

    def sign_up(self, name: str) -> None:
        row = Organisation.objects.create(name=name, billing_email=f"{len(self.customers)}@example.com")
        assign(f"organisation:{row.pk}", "free", anchor=timezone.localdate().day)
        self.customers.append(Customer(row))

    def try_out(self) -> None:
        self.customer.trial = timezone.now() + timedelta(days=14)
        assign(self.customer.subject, "pro", ends_at=self.customer.trial)

    def buy(self, plan: str = "pro") -> None:
        assign(self.customer.subject, plan)
        self.customer.plan, self.customer.trial, self.customer.leaves = plan, BEGIN, NEVER

    def cancel(self) -> None:
        self.buy("free")

    def cancel_for_later(self) -> None:
        if timezone.now() >= self.customer.leaves:
            self.customer.plan = "free"
        self.customer.leaves = self.customer.month_ends()
        self.customer.trial = min(self.customer.trial, self.customer.leaves)
        assign(self.customer.subject, "free", starts_at=self.customer.leaves)

    def reset(self) -> None:
        endpoint, which = self.dice.choice(list(COSTS)), f"organisation={self.customer.row.pk}"
        call_command("ratequota", "reset", "--identifier", which, "--endpoint", endpoint, stdout=io.StringIO())
        month = [entry for entry in self.customer.log if entry[:2] == (endpoint, self.customer.month())]
        for (plan,), units in sums((entry[2], entry[-1]) for entry in month).items():
            self.customer.note(endpoint, -units, plan)

    def kill_worker(self) -> None:
        """While it runs completions that nobody gets."""
        book.flush()
        which = {"organisation": str(self.customer.row.pk)}
        for _ in range(self.dice.randint(1, 3)):
            check_caller(identifiers=which, scope="completions", cost=COSTS["completions"]).__enter__()
        book.flush()
        book.ledger.clear()
        LedgerWriter.objects.exclude(held="").update(written_at=Now() - timedelta(minutes=11))
        book.drop()
        book.raise_store()

    def lose_redis(self) -> None:
        for key in self.redis.scan_iter("rqtest:saas*"):
            self.redis.delete(key)

    def requests(self) -> None:
        """Make some at once, until one is refused."""
        endpoint, self.within_minute = self.dice.choice(["completions", "completions", "exports"]), 0
        for _ in range(self.dice.choice([1, 1, 3, 3, 25])):
            if not self.request(endpoint):
                break
        book.flush()

    def request(self, endpoint: str) -> bool:
        """Make one; returns whether it is admitted."""
        customer, used = self.customer, self.customer.used(endpoint)
        limit, per_minute = self.limits[customer.plan_now(), endpoint]
        tokens, fails = self.dice.randint(1, 1000), endpoint == "completions" and self.dice.random() < 0.05
        views.ask_model = lambda _prompt, max_tokens: ("", 1 // 0 if fails else tokens)
        client = self.dice.choice([customer.member, customer.program])
        response = client.post(f"/{endpoint}/", {"prompt": "?"}, content_type="application/json")
        admitted = used + COSTS[endpoint] <= limit and self.within_minute < per_minute
        same(response.status_code, 429 if not admitted else 500 if fails else 200)
        left = limit - used - (COSTS[endpoint] if admitted else 0)
        self.done["refused"] += not admitted
        if response.status_code != 500:
            [(units, seconds)] = re.findall(rf'"{endpoint}/month";r=(\d+)(?:;t=(\d+))?', response["RateLimit"])
            same(units, str(max(0, left)))
        if response.status_code == 200:
            same(int(seconds), (customer.month_ends() - timezone.now()).total_seconds())
            same(response["X-RateLimit-Remaining"], str(left))
            customer.note(endpoint, tokens if endpoint == "completions" else 1)
            self.within_minute += 1
        customer.is_warned |= customer.used(endpoint) * 5 >= limit * 4
        return admitted

    def work_for_two(self) -> None:
        """Somebody in two organisations has a counter in each."""
        person, statuses = User.objects.create(username="freelancer"), []
        for name in ("One", "Two"):
            digest = sha256(name.encode()).hexdigest()
            organisation = Organisation.objects.create(name=name, billing_email=f"{name}@example.com")
            ApiKey.objects.create(organisation=organisation, user=person, digest=digest)
            ask = partial(Client().post, "/completions/", {"prompt": "?"}, headers={"X-API-Key": name})
            views.ask_model = lambda _prompt, max_tokens: ("", 1)
            statuses.append([ask().status_code for _ in range(self.per_member + 1)])
        same(statuses, [[*[200] * self.per_member, 429]] * 2)

    # What everybody sees.

    def compare(self) -> None:
        book.flush()
        now, lines, endpoints = {}, {}, dict(Endpoint.objects.values_list("pk", "name"))
        for customer in self.customers:
            limits = {endpoint: self.limits[customer.plan_now(), endpoint][0] for endpoint in COSTS}
            usage = {endpoint: (customer.used(endpoint), limit) for endpoint, limit in limits.items()}
            now |= {(customer.subject, endpoint): both for endpoint, both in usage.items() if both[0]}
            lines |= sums((customer.row.name, *entry[:3], entry[-1]) for entry in customer.log)
            months = sums((*entry[:2], entry[-1]) for entry in customer.log)
            first = self.dice.choice([entry[1] for entry in customer.log] or [customer.month()])
            days = sums((entry[0], *entry[3:]) for entry in customer.log if entry[1] == first)
            same(self.usage(customer), usage)
            same(self.history(customer), months)
            by_endpoint = by_day(QuotaWindow.objects.filter(subject=customer.subject), first)
            of_days = ((endpoints[one.window.endpoint_id], day) for one in by_endpoint for day in one.days)
            same(sums((name, one.day, one.charged - one.refunded) for name, one in of_days), days)
        same(self.invoiced(), lines)
        rows = [row for row in self.file("quotas/?csv=1&level=0&window=month") if row["used"] != "0"]
        same({(row["customer"], row["endpoint"]): (int(row["used"]), int(row["limit"])) for row in rows}, now)

    def usage(self, customer: Customer) -> dict[str, tuple[int, int]]:
        """What the usage endpoint says of this month, which the page for people repeats."""
        found, page = {}, customer.member.get("/usage/").content.decode()
        for one in customer.program.get("/quota/usage/").json()["limits"]:
            ends = customer.month_ends() if one["period"] == "month" else None
            same(one["ends_at"] and datetime.fromisoformat(one["ends_at"]), ends)
            until = "" if ends is None else date_format(ends, "DATETIME_FORMAT")
            row = f"<td>{one['title']}<td>{one['used']} of {one['limit']} {one['unit']}<td>{until}\n"
            assert row in page, f"{row} not in {page}"
            if ends is not None:
                found[one["scope"]] = one["used"], one["limit"]
        return found

    def history(self, customer: Customer) -> dict[Any, int]:
        rows = customer.member.get("/quota/usage/history/?period=month&page_size=1000").json()["results"]
        for row in rows:
            same((sum(line["used"] for line in row["lines"]), row["scope"]), (row["used"], row["scope"]))
        return sums((row["scope"], local_day(row["starts_at"]), row["used"]) for row in rows)

    def invoiced(self) -> dict[Any, int]:
        """What the command says, and the page."""
        found: list[tuple[Any, ...]] = []
        for month in ("2026-01", "2026-02", "2026-03", "2026-04", "2026-05"):
            lines, out = self.file(f"invoices/?csv=1&month={month}"), io.StringIO()
            call_command("ratequota", "usage", month=month, format="csv", stdout=out, stderr=io.StringIO())
            same(list(csv.DictReader(io.StringIO(out.getvalue().lstrip("\ufeff")))), lines)
            for line in lines:
                name, plan, begins = line["name"].removeprefix("'"), line["plan"].lower(), line["begins"]
                found.append((name, line["endpoint"], date.fromisoformat(begins), plan, line["used"]))
                same(line["complete"], str(date.fromisoformat(line["ends"]) <= timezone.localdate()))
                same(line["over"], "0")
        return sums(found)

    def file(self, path: str) -> list[dict[str, str]]:
        content = b"".join(self.operator.get(ADMIN + path).streaming_content).decode("utf-8-sig")
        return list(csv.DictReader(io.StringIO(content)))


def main(typed: list[list[str]], seed: int) -> None:
    """Type the page's commands, the first three before all traffic."""
    logging.disable(logging.CRITICAL)
    with time_machine.travel(BEGIN, tick=False) as clock:
        for command in typed[:3]:
            call_command(*command)
        process.limiter = OncePerSettings(partial(Limiter, clock=lambda: time.time_ns() // 1000))
        for job in (book.writing, book.dropping, book.raising):  # which ``flush`` does
            job.seconds = lambda: 0.0
        traffic = Traffic(clock, seed)
        traffic.run()
        for command in typed[3:]:
            call_command(*command)
        for _ in range(20):
            alerts.send()
        notify.wait_until_sent()
        warned = {one.row.billing_email for one in traffic.customers if one.is_warned}
        same({address for message in mail.outbox for address in message.to}, warned)
    print("all equal")
