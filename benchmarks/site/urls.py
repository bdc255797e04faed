"""URLs of the measured project."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("trivial/", views.Trivial.as_view()),
    path("listing/", views.Listing.as_view()),
    path("listing/<int:pk>/", views.Trivial.as_view(), name="listing-row"),
]
