"""URLs of the benchmark; requests are built on the view's own match."""

from django.urls import path
from rest_framework.response import Response
from rest_framework.views import APIView


class Search(APIView):
    """A view that does nothing."""

    throttle_scope: str | None = "search"

    def get(self, request: object) -> Response:
        """Answer."""
        return Response({"found": True})


urlpatterns = [
    path("api/search/", Search.as_view(), name="search"),
    path("api/one/", Search.as_view(throttle_scope="one"), name="one"),
]
