"""The DFLASH worker: a file per stage of a decode step; ``worker.py`` runs them in order."""
