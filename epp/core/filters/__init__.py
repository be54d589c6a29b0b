"""Filters: each keeps the endpoints that may serve a request, in the order given.

What an endpoint has not reported does not keep it out, unless a parameter says so. Times are CPU
per call with 64 endpoints.
"""
