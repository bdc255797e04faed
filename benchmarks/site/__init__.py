"""A small Django project whose views are measured; ``BENCH_VARIANT`` says what limits them."""
