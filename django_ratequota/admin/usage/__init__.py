"""Traffic and Health: what is requested and refused, and whether workers and Redis do their part."""
