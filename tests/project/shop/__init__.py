"""A project's app whose migration writes policies by historical models."""
