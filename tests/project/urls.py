"""URLs of the test suite."""

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.contrib.auth.admin import UserAdmin
from django.urls import include, path, re_path
from rest_framework.routers import DefaultRouter

from django_ratequota.admin import QuotaLinkMixin
from tests.project import views


class LinkedUserAdmin(QuotaLinkMixin, UserAdmin):  # type: ignore[type-arg]
    """Django's own, with the link to Explain."""


admin.site.unregister(get_user_model())
admin.site.register(get_user_model(), LinkedUserAdmin)

router = DefaultRouter()
router.register("reports", views.Reports, basename="report")

urlpatterns = [
    path("admin/", admin.site.urls),
    path("plain/", views.plain, name="plain"),
    path("aplain/", views.aplain, name="aplain"),
    path("decorated/", views.decorated, name="decorated"),
    path("adecorated/", views.adecorated, name="adecorated"),
    path("bare/", views.bare, name="bare"),
    path("costly/", views.costly, name="costly"),
    path("deciding/", views.deciding, name="deciding"),
    path("adeciding/", views.adeciding, name="adeciding"),
    path("class/", views.Decorated.as_view(), name="class"),
    path("aclass/", views.ADecorated.as_view(), name="aclass"),
    path("astacked/", views.AStacked.as_view(), name="astacked"),
    path("amethod/", views.ADecoratedMethod.as_view(), name="amethod"),
    path("thorough/", views.thorough, name="thorough"),
    path("checking/", views.checking, name="checking"),
    path("search/", views.Search.as_view(), name="search"),
    path("unthrottled/", views.Unthrottled.as_view(), name="unthrottled"),
    path("api-search/", views.api_search, name="api-search"),
    path("api/", include(router.urls)),
    path("v1/", include(([path("items/<int:pk>/", views.plain, name="item")], "v1"))),
    re_path(r"^[fF][iI][lL][eE][sS]/?$", views.plain, name="files"),
    path("nameless/", views.plain),
    path("quota/", include("django_ratequota.urls")),
]
