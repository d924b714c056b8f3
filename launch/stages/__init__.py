"""Stages: one file with `[[stage]]` tables, whose stages are run one after the other.

    config.py    the tables -> the configuration of each stage
    check.py     the checks of all stages, before the first starts
    state.py     stages.json: what each stage is, how far it came, and which models it began with
    child.py     a stage's command as a process of its own, which ends with this one
    run.py       the stages in order, and summary.json of all

A stage is an ordinary run, or an ordinary replay of written text, in a folder of its own below that of the whole:

    RUN/stages.json, summary.json, run.json
    RUN/stages/1-warmup.yaml, 1-warmup.record, 1-warmup-text/, 1-warmup/
    RUN/stages/2-distil.yaml, 2-distil/
"""
