"""`stillhouse audit RUN`: recounts what a run trained, from the record alone.

The count is independent: these modules import no other package of the project, so that a bug in the code that keeps
the ledger cannot hide itself here. Even the record has a decoder of its own.

    record.py    the record's bytes -> versions, masks, settled samples
    history.py   the kept branch of versions, and the distance between two versions
    tokens.py    tokens trained twice, or over the staleness bound
    samples.py   samples skipped, or settled twice or wrongly
    run.py       the other files of a run folder, the whole count, and the command line
    report.py    the findings, as text
    replayed.py  a replay: whether each batch of a record was trained once in each pass
    stages.py    all stages of a run with stages, and what one hands over to the next
"""
