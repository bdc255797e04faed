"""NetBox's own configuration for its tests, on the servers that the recipe starts."""

import os
from urllib.parse import urlsplit

from netbox import configuration_testing

from django_ratequota.testing import embedded_server

globals().update({name: value for name, value in vars(configuration_testing).items() if name.isupper()})
_postgres, _redis = urlsplit(os.environ["DATABASE_URL"]), urlsplit(embedded_server())
DATABASES = {
    "default": {"NAME": "postgres", "USER": _postgres.username, "HOST": _postgres.hostname, "PORT": _postgres.port}
}
REDIS = {
    name: {"HOST": _redis.hostname, "PORT": _redis.port, "DATABASE": database, "SSL": False}
    for name, database in (("tasks", 1), ("caching", 2))
}
