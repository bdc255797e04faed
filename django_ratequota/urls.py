"""``include("django_ratequota.urls")``: the usage endpoint."""

from __future__ import annotations

from django.urls import path

from .api import UsageView

app_name = "ratequota"
urlpatterns = [path("usage/", UsageView.as_view(), name="usage")]
