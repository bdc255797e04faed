"""URLs of a project whose routes depend on the language."""

from django.conf.urls.i18n import i18n_patterns
from django.urls import path

from tests.project import views

urlpatterns = i18n_patterns(path("items/", views.plain))
