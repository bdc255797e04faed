"""URLs of the measured project."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("items/", views.Items.as_view()),
    path("refused/", views.Refused.as_view()),
    path("plain/", views.plain),
    path("aplain/", views.aplain),
    path("limited/", views.limited),
    path("alimited/", views.alimited),
]
