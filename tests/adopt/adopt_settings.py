"""The settings of the project in ADOPT_PROJECT, with this app added to them if ADOPT_APP is set."""

import os
from importlib import import_module
from urllib.parse import urlsplit

from django_ratequota.testing import embedded_server

os.environ.setdefault("REDIS_URL", embedded_server())
# Plane reads the settings while its own are imported.
os.environ["DJANGO_SETTINGS_MODULE"] = os.environ["ADOPT_PROJECT"]
project = import_module(os.environ["ADOPT_PROJECT"])
os.environ["DJANGO_SETTINGS_MODULE"] = __name__
globals().update({name: value for name, value in vars(project).items() if name.isupper()})
# Baserow reads it; Django 5.1 has it no more.
DEFAULT_FILE_STORAGE = "django.core.files.storage.FileSystemStorage"

server = urlsplit(os.environ["ADOPT_DATABASE"])
for database in project.DATABASES.values():
    if "postgresql" in database["ENGINE"]:
        database.update(USER=server.username, HOST=server.hostname, PORT=server.port)

if os.environ.get("ADOPT_APP"):
    INSTALLED_APPS = [*project.INSTALLED_APPS, "django_ratequota"]
    MIDDLEWARE = [*project.MIDDLEWARE, "django_ratequota.middleware.RateQuotaMiddleware"]
    # Some tests count queries, and take longer than the default between two looks at the database.
    RATEQUOTA = {"REDIS_URL": embedded_server(), "ENFORCE_ALL": True, "POLL_SECONDS": 86_400}
