"""From a request to a decision: identify, resolve, check; ``on_error``; settlement afterwards."""
