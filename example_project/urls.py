"""The example's API, its admin, and the page that tries both."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import include, path

from . import home, views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/login/", views.Login.as_view(), name="login"),
    path("api/reports/", views.ReportList.as_view(), name="report-list"),
    path("api/reports/<int:number>/", views.ReportDetail.as_view(), name="report-detail"),
    path("api/search/", views.Search.as_view(), name="search"),
    path("api/exports/", views.Export.as_view(), name="export"),
    path("api/status/", views.status, name="status"),
    path("api/completions/", views.completions, name="completions"),
    path("api/quota/", include("django_ratequota.urls")),  # django-ratequota, line 5: clients read what is left
    # The demo's own page; not needed to limit anything.
    path("", home.Home.as_view(), name="home"),
    path("sign-out/", LogoutView.as_view(next_page="home"), name="sign-out"),
    path("docs/<path:name>/", home.documentation, name="documentation"),
]
