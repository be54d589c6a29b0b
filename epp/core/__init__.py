"""The decision, without I/O: what came in goes in as values and times, what follows comes out as
values.

Nothing in here imports asyncio, grpc, an HTTP, Kubernetes, zmq or metrics client, `time`,
`logging`, `os` or `socket`; `make test` holds it to that. A simulator can therefore drive this very
code in virtual time."""
