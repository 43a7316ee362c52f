"""Hours under load: ``python -m tests.soak [ROW ...] --share 0.05 --out FOLDER`` (``make soak ROW=pair SHARE=0.05``).

A row of ``rows.py`` has servers, a load and what happens to them meanwhile. Requests are drawn from a catalogue, so
that a plain server has to answer each entry only once. They come in bursts, end by themselves, are aborted or lose
their client. A row ends by itself; an interrupted one goes on after its last finished burst.

The verdict compares every answer, or its beginning, with the reference's. Then it looks at the pools, the health
endpoint and the events, and of a long row at the memory of the processes and the speed at the beginning and the end.
"""
