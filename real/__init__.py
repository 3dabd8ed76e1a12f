"""The real world: engines and a trainer in processes of their own, driven by asyncio. ``job`` is the way in."""
