"""Ways to run the server on machines that are not yours."""
