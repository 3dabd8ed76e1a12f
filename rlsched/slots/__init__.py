"""The slots that come with rlsched, a module for each: admit, select, expire, publish, place, route."""
