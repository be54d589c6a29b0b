"""Pickers: each chooses endpoints from the weighted totals; all chance comes from the `rng` given.

`maxNumOfEndpoints` above 1 asks for fallbacks too: the gateway may retry there, in that order.
"""
