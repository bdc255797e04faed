"""``include("django_ratequota.urls")``: the usage endpoints."""

from __future__ import annotations

from django.urls import path

from .api import UsageHistoryView, UsageView

app_name = "ratequota"
urlpatterns = [
    path("usage/", UsageView.as_view(), name="usage"),
    path("usage/history/", UsageHistoryView.as_view(), name="usage-history"),
]
