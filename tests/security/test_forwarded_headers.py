"""A client's ``X_Forwarded_For`` must not pass for the proxy's ``X-Forwarded-For``, which is in TRUSTED_PROXIES."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncRequestFactory
from packaging.requirements import Requirement

from django_ratequota.policies.requests.caller import Caller

ROOT = Path(__file__).parent.parent.parent

PROXY, CLIENT, FORGED = "10.0.0.5", "203.0.113.7", "198.51.100.1"


@pytest.mark.parametrize("name", [b"x_forwarded_for", b"x-forwarded_for", b"x_forwarded-for"])
@pytest.mark.parametrize("last", [True, False], ids=["after the proxy's", "before it"])
def test_x_forwarded_for_beside_the_proxy_s_header(settings: Any, name: bytes, last: bool) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": [f"{PROXY}/32"]}
    proxys, clients = (b"x-forwarded-for", CLIENT.encode()), (name, FORGED.encode())
    headers = [proxys, clients] if last else [clients, proxys]
    request = AsyncRequestFactory().request(path="/", headers=headers, client=(PROXY, 4711))
    assert Caller(request).value("ip") == CLIENT


def test_no_django_that_merges_such_headers_is_installed_beside_us() -> None:
    """CVE-2026-3902, mended in Django 5.2.13 and 6.0.4."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [django] = [one for one in map(Requirement, project["dependencies"]) if one.name == "django"]
    found = {version: django.specifier.contains(version) for version in ("5.2.12", "6.0", "6.0.1", "6.0.2", "6.0.3")}
    assert not any(found.values()), found
    assert all(django.specifier.contains(version) for version in ("5.2.13", "6.0.4", "6.1"))
