"""The three policies, and one that refuses, written into the measured project's database."""

from __future__ import annotations

from .variants import LIMIT

USERS = 50


def write() -> None:
    """Migrate, and write users, a default plan and the policies."""
    from django.contrib.auth.models import User
    from django.core.management import call_command

    from django_ratequota.models import Endpoint, Plan, RatePolicy

    call_command("migrate", verbosity=0)
    User.objects.bulk_create(User(pk=number, username=str(number)) for number in range(1, USERS + 1))
    plans = [
        Plan.objects.create(name=name, slug=name.lower(), default_for=kind)
        for name, kind in (("Member", "authenticated"), ("Guest", "anonymous"))
    ]
    items = Endpoint.objects.create(name="items")
    for plan in plans:
        RatePolicy.objects.create(plan=plan, rates=f"{LIMIT}/min")
    RatePolicy.objects.create(endpoint=items, rates=f"{LIMIT}/min")
    RatePolicy.objects.create(endpoint=items, counted_per="everyone", rates=f"{LIMIT}/min")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="refused"), rates="1/day")


if __name__ == "__main__":
    import django

    django.setup()
    write()
