"""Django settings of the tests: SQLite, or PostgreSQL or MariaDB by DATABASE_URL; Redis by tests.support.server."""

from __future__ import annotations

import os

import dj_database_url

from tests.support import server

SECRET_KEY = "tests"
DEBUG = False
ALLOWED_HOSTS = ["testserver", "localhost", "127.0.0.1"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "tests.project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_ratequota",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_ratequota.middleware.RateQuotaMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": dj_database_url.config(default=os.environ.get("RATEQUOTA_TEST_DATABASE", "sqlite://:memory:"))
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.mysql":
    import pymysql

    # Django demands mysqlclient 2.2.1 or later.
    pymysql.version_info = (2, 2, 1, "final", 0)
    pymysql.install_as_MySQLdb()
CACHES = {
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url()},
    "local": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# A long deadline, because the machine may stall. Tests of the deadline set their own.
# No statistics, no reports and no deny cache, because tests count keys and commands.
RATEQUOTA = {
    "PREFIX": "rqtest",
    "TIMEOUT": float(os.environ.get("RATEQUOTA_TEST_TIMEOUT", 5)),
    "STATISTICS_SECONDS": 0,
    "DENY_CACHE_SECONDS": 0,
}
REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}
