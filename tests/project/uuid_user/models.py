"""The user of tests.project.settings_uuid."""

from __future__ import annotations

import uuid

from django.contrib.auth.models import AbstractUser
from django.db import models


class Customer(AbstractUser):
    """Django's user but for the key and the name of the model."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
