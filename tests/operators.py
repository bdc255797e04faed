"""Who is at work in the admin."""

from __future__ import annotations

from django.contrib.auth.models import Permission, User
from django.test import Client


def client_of(*permissions: str, superuser: bool = False, name: str = "operator") -> Client:
    """A browser in which a new operator is logged in, who holds these permissions (codenames)."""
    user = User.objects.create(username=name, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client
