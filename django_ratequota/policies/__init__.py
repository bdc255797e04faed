"""Which policies apply to a request: caller, routes, snapshot, cache and resolver. Explain runs the same code."""
