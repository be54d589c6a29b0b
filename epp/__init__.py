"""An Endpoint Picker for Envoy: which vLLM endpoint of the pool should serve this request?"""

__version__ = "0.1.0"
