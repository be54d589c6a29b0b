"""Peers: the routing rules of other systems, written anew from their formulas.

    Rule      where does this request want to go?                      simple, affinity, dynamo, ...
    Account   what the router itself sent and has not seen end              account
    Peer      Rule + Account = a Policy of the simulator                        peer
    Held      the same with our hold in front: late, or not at all              held
    POLICIES  every name a report may show                                      table

A rule reads the account and the view and changes neither, so `Held` can ask it again and again.
Ties are broken as in the original.
"""

from bench.sim.policies.held import Held
from bench.sim.policies.peer import Peer, Rule, Wishing
from bench.sim.policies.table import OPTIONAL_POLICIES, POLICIES

__all__ = ["OPTIONAL_POLICIES", "POLICIES", "Held", "Peer", "Rule", "Wishing"]
