"""A faithful fake of the Kubernetes API server on a real socket, for tests and for playing.

`fake_api.py` is its front: start reading there. It keeps the rules that clients trip over
(versions, paging, watches, selectors, graceful deletes, conflicts, MicroTime, absent CRDs) and
breaks in the ways real servers and networks break, on demand (`faults.py`). Whether it is
faithful is checked by `tests/contract`, which can run against a real cluster too, and by real
kubectl and lightkube.

What it has not: protobuf (so `kubectl apply` works and `kubectl create configmap` does not), tables
(kubectl prints name and age), HTTP/2, JSON patch, merge by list keys, managedFields, admission,
the lifecycle of namespaces (one appears with its first object), and kinds beyond `resources.py`.
"""
