"""What a worker tells of itself: counters, metrics, identity, and the guard against host waits."""
