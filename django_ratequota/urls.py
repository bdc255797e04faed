"""``include("django_ratequota.urls")``: what clients may ask."""

from __future__ import annotations

from django.urls import path

from .api import UsageView

app_name = "ratequota"
urlpatterns = [path("usage/", UsageView.as_view(), name="usage")]
