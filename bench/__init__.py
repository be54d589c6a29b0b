"""Measurements and the simulated engine: nothing here is part of the product."""
