"""Settings of the measured project: one variant a process, each installed as its own documentation says."""

from __future__ import annotations

import os

from .variants import VARIANTS

VARIANT = VARIANTS[os.environ.get("BENCH_VARIANT", "none")]
REDIS_URL = os.environ["BENCH_REDIS_URL"]

SECRET_KEY = "benchmarks"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "benchmarks.site.urls"
WSGI_APPLICATION = "benchmarks.site.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "django_ratequota",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
    *VARIANT.middleware,
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["BENCH_DATABASE"]}}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}}
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["benchmarks.site.authentication.NumberAuthentication"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_THROTTLE_CLASSES": list(VARIANT.throttles),
}

# Statistics, reports and headers stand at their defaults. A machine that measures is busy: nothing may time out.
RATEQUOTA = {"PREFIX": "bench", "TIMEOUT": 1.0}
