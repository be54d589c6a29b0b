"""Follows a cluster through its API server. Every module talks plain HTTP and JSON; nothing in here
decides where a request goes."""
