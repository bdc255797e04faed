"""The settings of the project in ADOPT_PROJECT, with this app added to them if ADOPT_APP is set."""

import os
from importlib import import_module

project = import_module(os.environ["ADOPT_PROJECT"])
globals().update({name: value for name, value in vars(project).items() if name.isupper()})

if os.environ.get("ADOPT_APP"):
    from django_ratequota.testing import embedded_server

    INSTALLED_APPS = [*project.INSTALLED_APPS, "django_ratequota"]
    MIDDLEWARE = [*project.MIDDLEWARE, "django_ratequota.middleware.RateQuotaMiddleware"]
    # Some tests count queries, and take longer than the default between two looks at the database.
    RATEQUOTA = {"REDIS_URL": embedded_server(), "ENFORCE_ALL": True, "POLL_SECONDS": 86_400}
