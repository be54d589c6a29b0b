"""Requests on their way to an endpoint that has no room for them yet."""
