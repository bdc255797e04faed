"""docs/howto/own-columns.md and the migration of docs/howto/ship-limits.md, each in a project of its own."""

from __future__ import annotations

from pathlib import Path

from tests.package.test_docs import DOCS
from tests.support import server
from tests.support.projects import run_project
from tests.support.snippets import snippets

SETTINGS = """
INSTALLED_APPS += ["django_ratequota", "django.contrib.sessions", %r]
MIDDLEWARE += [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django_ratequota.middleware.RateQuotaMiddleware",
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
RATEQUOTA = {"PREFIX": "rqtest.own", "TIMEOUT": 5.0, "REDIS_URL": %r, "DENY_CACHE_SECONDS": 0, "ENFORCE_ALL": True}
"""
URLS = """
from django.http import HttpResponse
from django.urls import path
urlpatterns = [path("", lambda request: HttpResponse())]
"""
ONCE = """
from django.utils import timezone
from django_ratequota.models import Endpoint, Plan, RatePolicy
call_command("ratequota", "import", "policies.yaml", "--only-new")
RatePolicy.objects.all().delete()
call_command("migrate", verbosity=0)
print(RatePolicy.objects.exists())
place = {"plan": Plan.objects.get(), "endpoint": Endpoint.objects.get()}
RatePolicy.objects.create(**place, rates="5/min", mode="log")
RatePolicy.objects.create(**place, rates="6/min", starts_at=timezone.now())
for _ in range(2):
    call_command("migrate", "shop", "0001", verbosity=0)
    call_command("migrate", verbosity=0)
print(*RatePolicy.objects.order_by("pk").values_list("rates", flat=True))
"""
TEAMS = """
from django.contrib.auth.models import User
from django_ratequota.models import PolicyChange, RatePolicy
from teams.models import Team

call_command("migrate", run_syncdb=True, verbosity=0)
call_command("ratequota", "import", "policies.yaml", stdout=io.StringIO())
clients = {}
for name in ("free", "pro", "seven", "blocked"):
    clients[name] = Client()
    user = User.objects.create_user(name)
    team = Team.objects.create(tier="pro" if name == "pro" else "free")
    team.members.add(user)
    clients[name].force_login(user)
seven, blocked = Team.objects.order_by("pk")[2:]
Team.objects.filter(pk=seven.pk).update(hourly_limit=7)
Team.objects.filter(pk=blocked.pk).update(hourly_limit=0)

def admitted():
    return [sum(one.get("/").status_code == 200 for _ in range(9)) for one in clients.values()]

call_command("import_limits")
print(admitted())
history = PolicyChange.objects.count()
call_command("import_limits")
print(PolicyChange.objects.count() - history)
import teams.receivers
for row, limit in ((seven, None), (blocked, 8)):
    row.hourly_limit = limit
    row.save()
print(list(RatePolicy.objects.exclude(subject="").values_list("subject", "rates")), admitted()[3])
RatePolicy.objects.create(subject=f"team:{blocked.pk}", counted_per="team", rates="2/hour", mode="log")
blocked.hourly_limit = 9
blocked.save()
print(list(RatePolicy.objects.exclude(subject="").order_by("pk").values_list("rates", "mode")))
blocked.delete()
print(list(RatePolicy.objects.exclude(subject="").values_list("rates", "mode")))
"""


def files(page: str, app: str) -> dict[str, str]:
    """Return the page's files by path, with the packages that they need."""
    found = {
        one.file or "policies.yaml": one.text for one in snippets(DOCS / page) if one.file or one.language == "yaml"
    }
    packages = {f"{folder}/__init__.py": "" for name in found for folder in reversed(Path(name).parents[:-1])}
    settings = SETTINGS % (app, server.url()) + found.get("settings.py", "")
    return {**packages, **found, "urls.py": URLS, "settings.py": settings}


def test_a_column_becomes_policies(redis_client: object, tmp_path: Path) -> None:
    found = run_project(tmp_path, files("howto/own-columns.md", "teams"), TEAMS)
    assert found == [
        "[3, 5, 7, 0]",
        "0",
        "[('team:4', '8/hour')] 8",
        "[('9/hour', 'enforce'), ('2/hour', 'log')]",
        "[('2/hour', 'log')]",
    ]


def test_a_migration_creates_limits_once(redis_client: object, tmp_path: Path) -> None:
    initial = "from django.db import migrations\nclass Migration(migrations.Migration):\n    operations = []\n"
    shop = {**files("howto/ship-limits.md", "shop"), "shop/migrations/0001_initial.py": initial}
    created, summary, _undo, again, beside_others = run_project(tmp_path, shop, ONCE)
    assert created == "+ policy everyone × all endpoints per ip: rates 300/min"
    assert (summary, again) == ("1 created, 0 changed, 0 deleted", "False")
    assert beside_others == "5/min 6/min 10/min"
