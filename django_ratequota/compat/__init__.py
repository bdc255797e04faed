"""Drop-in replacements for other libraries' limiters on this package's engine: migrating is changing an import.

``drf`` replaces ``rest_framework.throttling``, ``ratelimit`` replaces ``django_ratelimit``. Rates stay in code and
settings; policies from the admin do not apply.
"""
