"""What operators do and ask, without a page: the admin and the command call these."""
