"""NetBox's own configuration for its tests, on the servers that the recipe starts."""

import os
from urllib.parse import urlsplit

from netbox import configuration_testing

from django_ratequota.testing import embedded_server

globals().update({name: value for name, value in vars(configuration_testing).items() if name.isupper()})
__file__ = configuration_testing.__file__  # a test looks where the configuration is
_postgres, _redis = urlsplit(os.environ["ADOPT_DATABASE"]), urlsplit(embedded_server())
DATABASES = {
    "default": {
        "NAME": "netbox",
        "USER": _postgres.username,
        "HOST": _postgres.hostname,
        "PORT": _postgres.port,
        "TEST": {"TEMPLATE": "netbox"},
    }
}
REDIS = {
    name: {"HOST": _redis.hostname, "PORT": _redis.port, "DATABASE": database, "SSL": False}
    for name, database in (("tasks", 1), ("caching", 2))
}
