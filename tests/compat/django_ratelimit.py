"""``python -m tests.compat.django_ratelimit``: runs the tests in django-ratelimit's wheel with this package."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ORIGINAL, OURS = "django_ratelimit", "django_ratequota.compat.ratelimit"
NOON_US = 1_763_726_400 * 10**6
SUBMODULES = ("core", "decorators", "exceptions", "middleware")


def main() -> int:
    """Run the tests; returns the number of failures."""
    from django.conf import settings
    from django.test.utils import get_runner

    from django_ratequota.compat.limiters import limiter_of
    from django_ratequota.compat.ratelimit import core

    # No window ends between two requests of one test.
    core.limiter_of = functools.partial(limiter_of, clock=lambda: NOON_US)
    tests = load_tests()
    runner = get_runner(settings)(verbosity=1, interactive=False)
    suite = runner.test_loader.loadTestsFromModule(tests)
    runner.build_suite = lambda *args, **kwargs: suite
    return int(runner.run_tests([]))


def load_tests() -> ModuleType:
    """Import django-ratelimit's module of tests, with this package's modules in place of those it imports."""
    found = importlib.util.find_spec(ORIGINAL)
    assert found is not None
    assert found.origin is not None
    assert ORIGINAL not in sys.modules
    sys.modules[ORIGINAL] = importlib.import_module(OURS)
    for name in SUBMODULES:
        sys.modules[f"{ORIGINAL}.{name}"] = importlib.import_module(f"{OURS}.{name}")
    name = f"{ORIGINAL}.tests"
    spec = importlib.util.spec_from_file_location(name, Path(found.origin).with_name("tests.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.compat.settings"
    # Not the server of the calling suite, because the tests empty it.
    os.environ.pop("RATEQUOTA_TEST_REDIS_URL", None)
    import django

    django.setup()
    sys.exit(main())
