"""Scorers: each gives every endpoint a number from 0 (worst) to 1 (best).

A module is a family that reads the same thing: `scraped` what the engines report, `attribute` what
they report beyond that, `inflight` what we sent ourselves, `prefix` what is cached where, `lora`
which adapters are loaded, `latency` what is predicted, `labels` and `context_length` labels. What
an endpoint has not reported is unknown, never 0. Times are CPU per call with 64 endpoints.
"""
