"""`make demo`: a mixed workload through a real Envoy, with the picker and with round robin.

`options` are the flags, `scene` decides what happens, `workload` plans what is sent (pure, seeded),
`client` sends it, `arms` runs it over a stack of real processes and disturbs that, `decisions`
reads the picker's log, `figures` and `promises` judge (pure), `report` writes what a person reads
(pure), `run` joins them.
"""
