"""`make demo`: a mixed workload through a real Envoy, with the picker and round robin, side by side.

`workload` plans it (pure, seeded), `client` sends it, `arms` runs it over a stack of real
processes and disturbs that, `decisions` reads the picker's log, `figures` and `promises` judge
(pure), `report` writes what a person reads (pure), `options` are the flags, `__main__` joins them.
"""
