"""The example's API and its admin."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from . import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/login/", views.Login.as_view(), name="login"),
    path("api/reports/", views.ReportList.as_view(), name="report-list"),
    path("api/reports/<int:number>/", views.ReportDetail.as_view(), name="report-detail"),
    path("api/search/", views.Search.as_view(), name="search"),
    path("api/exports/", views.Export.as_view(), name="export"),
    path("api/status/", views.status, name="status"),
    path("api/completions/", views.completions, name="completions"),
]
