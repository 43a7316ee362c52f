"""The DFLASH worker: one file per stage of a step, :mod:`sglang_dflash.worker.worker` puts them in order."""
