"""Talks to the world: servers, scrapes, files, signals. Holds no policy."""
