"""Drop-ins for other libraries' limiters, counted by this one's engine: moving over is an import.

``drf`` stands in for ``rest_framework.throttling``, ``ratelimit`` for ``django_ratelimit``. Rates stay in code and
settings; policies of the admin are not asked.
"""
