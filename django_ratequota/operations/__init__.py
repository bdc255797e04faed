"""The tasks and questions of operators, for the admin's pages and the command."""
