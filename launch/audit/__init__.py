"""`cluster.py audit RUN`: counts again, from the record alone, what a run trained.

The count is independent: these modules import no other package of the project, so that a mistake in what keeps the
ledger cannot hide itself here. Even the record is decoded anew.

    record.py    the record's bytes -> versions, masks, settled samples
    history.py   which versions are on the kept branch, and how far apart two versions are
    tokens.py    trained twice, over the bound
    samples.py   skipped, settled twice, begun anew
    run.py       what else is read of a run's folder, and the whole count
    report.py    what was found, as text
"""
