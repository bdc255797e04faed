"""What a request is: its caller, its route, its view, and how the view handles its method. Imports no policy."""
