"""The draft window: how far back the drafter reads, and where the K/V of that part live."""
