"""Redis as a place to send a command to: connections, deadline, breaker; one server, Sentinel, Cluster."""
