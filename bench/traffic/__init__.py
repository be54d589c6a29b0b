"""The two ends of a benched gateway: clients that drive it, and an upstream that costs little."""
