"""The same pages under django-unfold; a run of its own, as the settings differ."""
