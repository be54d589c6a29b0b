"""Filters: each keeps the endpoints that may serve a request, in the order given."""
