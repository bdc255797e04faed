"""Makes the user model the one that the suite means by ``User``."""

from __future__ import annotations

from django.apps import AppConfig
from django.contrib.auth import get_user_model


class UuidUserConfig(AppConfig):
    name = "tests.project.uuid_user"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import django.contrib.admin
        from django.contrib.auth import models
        from django.contrib.auth.admin import UserAdmin

        # The suite's modules import Django's own User, which is swapped out here: they get this one by that name.
        models.User = get_user_model()
        django.contrib.admin.site.register(get_user_model(), UserAdmin)
