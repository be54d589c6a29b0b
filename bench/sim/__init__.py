"""Routing policies in virtual time: simulated engines, real traces, and the product's own core.

    workloads ─ SimRequest ─▶ cluster ─ which endpoint? ─▶ policies | ours (epp.core)
                                 │  submit                        ▲ first byte, end, scrape
                                 ▼                                │
                              bench.engine (steps) ── tokens ─────┘
    cluster ─ Outcome ─▶ figures ─▶ report (JSON, Markdown, plots)

Nothing here reads a clock: the same inputs and seed give the same run, byte for byte.
"""
