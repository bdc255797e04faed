"""Django settings of the benchmark: what a project would write, and nothing switched off to look better."""

from __future__ import annotations

import os

import dj_database_url

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")

SECRET_KEY = "benchmarks"
DEBUG = False
ALLOWED_HOSTS = ["testserver", "localhost", "127.0.0.1"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "benchmarks.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "django_ratequota",
]
DATABASES = {"default": dj_database_url.config(default="sqlite://:memory:")}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
# The defaults, statistics and reports included; only the deadline allows for a machine that stalls.
RATEQUOTA = {
    "TIMEOUT": 5.0,
    "STATISTICS_SECONDS": float(os.environ.get("RATEQUOTA_BENCH_STATISTICS", 1)),
}
REST_FRAMEWORK: dict[str, object] = {"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None}

# What the other packages are told.
RATELIMIT_BACKEND = "redis"
RATELIMIT_REDIS = {"url": REDIS_URL}
RATELIMIT_PLUS = {"REDIS_URL": REDIS_URL}
