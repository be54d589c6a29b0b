"""Policy `expected-latency`: what a request costs on each endpoint in seconds, and how the engine
rates behind that are learned."""
