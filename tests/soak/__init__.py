"""A long load on one real server: ``python -m tests.soak --requests 10000 --out FOLDER`` (``make soak``).

Requests of all kinds are drawn from a catalogue, so that a plain server has to answer each entry only once. They come
in bursts, end by themselves, are aborted or lose their client; the prefix cache is flushed between bursts, and weights
are loaded again under load. The server has too little K/V for all that it runs: it retracts requests, evicts prefixes.

The verdict compares every answer, or its beginning, with the reference's text. Then it looks at the pools, the memory
of the processes, the health endpoint, and the speed of the same load at the beginning and at the end.
"""
