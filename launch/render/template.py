"""The files of schedulers are templates of jinja beside this file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jinja2

from stillhouse.launch.report.figures import plural


def render_template(name: str, **values: object) -> str:
    """Filters beside jinja's own: `quote` and `words`, a word and a list of words for a shell; `json`, for YAML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "quote": lambda word: shlex.quote(str(word)),
        "words": shlex.join,
        "json": json.dumps,
        "plural": plural,
    }
    return environment.get_template(name).render(**values)
