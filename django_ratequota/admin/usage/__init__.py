"""The Live usage page: requests, refusals and workers."""
