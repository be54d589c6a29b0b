"""A complete Envoy bootstrap for running without a gateway product."""
