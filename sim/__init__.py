"""The simulated world: SimPy fires events, everything else is integers. ``world`` is the way in."""
