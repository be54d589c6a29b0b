"""Bytes to events and back: no I/O, no policy."""
