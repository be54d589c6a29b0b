"""Who tells of a membership may keep what did not change, or make every spec anew: all the same."""

import msgspec
from hypothesis import given, strategies as st

from epp.core.model import EndpointSpec
from epp.core.pool import Members, Pool

specs = st.builds(
    lambda host, uid, label: EndpointSpec(f"10.0.0.{host}", 8000, uid=uid, labels={"l": label}),
    st.integers(1, 5),
    st.sampled_from("ab"),
    st.sampled_from("xy"),
)
memberships = st.lists(st.lists(specs, max_size=5, unique_by=lambda s: s.address), max_size=12)


class Heard:
    """What a pool tells of, and what it holds."""

    def __init__(self) -> None:
        self.pool = Pool(stale_after_s=5.0)
        self.story: list[tuple[str, str, str, int]] = []
        self.pool.listen(self)

    def joined(self, endpoint) -> None:
        self.story.append(("+", endpoint.address, endpoint.spec.uid, endpoint.slot))

    def left(self, endpoint) -> None:
        self.story.append(("-", endpoint.address, endpoint.spec.uid, endpoint.slot))

    def held(self) -> list[EndpointSpec]:
        snapshot = self.pool.snapshot(1.0).endpoints
        assert list(snapshot) == sorted(self.pool.endpoints, key=lambda e: e.address)
        return [endpoint.spec for endpoint in snapshot]


@given(told=memberships)
def test_a_pool_holds_the_last_membership_whoever_kept_which_specs(told) -> None:
    kept, fresh = Heard(), Heard()
    objects: dict[tuple[str, str, str], EndpointSpec] = {}
    for members in told:
        same = [objects.setdefault((s.address, s.uid, s.labels["l"]), s) for s in members]
        copies = [msgspec.structs.replace(s) for s in members]
        kept_change = kept.pool.apply(Members(tuple(same)), 1.0)
        fresh_change = fresh.pool.apply(Members(tuple(copies)), 1.0)
        assert kept.held() == fresh.held() == sorted(members, key=lambda s: s.address)
        for name in ("joined", "left"):
            one, other = (getattr(change, name) for change in (kept_change, fresh_change))
            assert {e.address for e in one} == {e.address for e in other}
        assert {e.slot for e in kept.pool.endpoints} <= set(range(5))
    assert sorted(s[:3] for s in kept.story) == sorted(s[:3] for s in fresh.story)
