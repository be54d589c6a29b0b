"""HTTP/2 carrying gRPC, the server's side, without I/O: bytes in, calls of `core.streams`, bytes
out.

`connection` is the only module others need; docs/http2.md lists what it holds a peer to.
"""
