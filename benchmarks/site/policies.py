"""The three policies and the users, written into the measured project's database."""

from __future__ import annotations

from .variants import LIMIT

#: As many rows as the listing view returns.
USERS = 60


def write() -> None:
    """Migrate, and write users, a default plan and the policies."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.utils import timezone

    from django_ratequota.models import Endpoint, Plan, RatePolicy

    call_command("migrate", verbosity=0)
    User.objects.bulk_create(
        User(
            pk=number,
            username=f"user{number}",
            first_name="Ada",
            last_name=f"Lovelace {number}",
            email=f"user{number}@example.org",
            last_login=timezone.now(),
        )
        for number in range(1, USERS + 1)
    )
    plan = Plan.objects.create(name="Member", slug="member", default_for="authenticated")
    items = Endpoint.objects.create(name="items")
    RatePolicy.objects.create(plan=plan, rates=f"{LIMIT}/min")
    RatePolicy.objects.create(endpoint=items, rates=f"{LIMIT}/min")
    RatePolicy.objects.create(endpoint=items, counted_per="everyone", rates=f"{LIMIT}/min")


if __name__ == "__main__":
    import django

    django.setup()
    write()
