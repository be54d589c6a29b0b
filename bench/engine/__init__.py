"""A simulated vLLM: an HTTP server that behaves as vLLM 0.32 does where a router can tell.

The parts, from the inside out; only the last five know of asyncio or HTTP:

    cost            how long one engine step takes
    kvcache         blocks of the KV cache: named, shared, evicted
    scheduler       the engine: queue, continuous batching, chunked prefill, preemption
    tokens          text to tokens, tokens to block names, the text that is "generated"
    stats           counters and histograms, folded from what the scheduler did
    metrics_page    these as a Prometheus page
    bodies, answers what clients send, and what they get back, per API
    faults          switches that make the engine misbehave
    kvevents        the blocks' hashes and the events of the KV cache, encoded
    publisher       sends these over ZeroMQ, if asked to, from a thread
    driver          runs the scheduler in real time
    server          the routes
    __main__        `python -m bench.engine`

`scheduler` takes time as a number, so a discrete-event simulation drives the same engine.
"""
