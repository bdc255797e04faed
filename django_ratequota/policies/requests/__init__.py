"""What a request is: its caller, its route, its view and what the view does with its method. Knows no policy."""
