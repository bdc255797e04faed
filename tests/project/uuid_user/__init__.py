"""A project's own user model, whose key is a UUID."""
