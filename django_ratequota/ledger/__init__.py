"""The books: what calendar windows have charged and refunded, written to the database and restored from there."""
