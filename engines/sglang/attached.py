"""Running SGLang servers that the user names by `urls`: what they are, asked before anything starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from stillhouse.engines.config import ServerLinkConfig, WorkerSettings
from stillhouse.engines.http.link import RequestRefused, ServerUnavailable, tls_context
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.provider import EngineRole, ServerFacts
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import Features, probe_server, why_unfit
from stillhouse.engines.sglang.tokenizer import compare_tokenizers
from stillhouse.protocol.addresses import is_local

PROBE_TIMEOUT_S: Final = 20.0
"""Upper limit of the connect timeout here, because the servers should be running."""
AT_ONCE: Final = 16
log = logging.getLogger(__name__)


def ask(key: str, role: EngineRole, settings: WorkerSettings, student: str) -> tuple[list[ServerFacts], list[str]]:
    """engines.provider.ServerEngine.ask for SGLang."""
    own = settings.section("sglang", SGLangConfig if role == "actor" else ServerLinkConfig)
    short = msgspec.structs.replace(own, connect_timeout_s=min(own.connect_timeout_s, PROBE_TIMEOUT_S))
    name, secret = own.api_key_env, os.environ.get(own.api_key_env, "") if own.api_key_env else ""
    if name and not secret:
        return [], [f"{key}.sglang.api_key_env: the environment has no {name}, expected the bearer key of {key}.urls"]
    if open_links := [*_open_links(key, settings.urls, bool(secret))]:
        return [], open_links
    try:
        tls_context(own.ca_file)
    except ValueError as error:
        return [], [f"{key}.sglang.{error}"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_ask_one, settings.urls, repeat(short), repeat(secret)))
    mistakes = [f"{key}.urls: {answer}" for answer in answers if isinstance(answer, str)]
    features = [answer for answer in answers if isinstance(answer, Features)]
    if isinstance(own, SGLangConfig) and not mistakes:
        unfit = [(url, why_unfit(one, own)) for url, one in zip(settings.urls, features, strict=True)]
        mistakes = [f"{key}.urls: {url}: {why}" for url, why in unfit if why]
    if mistakes:
        return [], mistakes
    return [one.facts for one in features], _other_tokenizers(key, settings.urls, short, secret, Path(student))


def _open_links(key: str, urls: tuple[str, ...], has_key: bool) -> Iterator[str]:
    """Servers on other machines need TLS and a key."""
    for url in urls:
        parts = urlsplit(url)
        if is_local(parts.hostname or ""):
            continue
        if parts.scheme != "https":
            yield (
                f"{key}.urls: got {url}, where prompts and answers can be read on the way; expected https://, or an "
                f"address of this machine. SGLang takes --ssl-certfile and --ssl-keyfile; {key}.sglang.ca_file names "
                "the authority of its certificate"
            )
        elif not has_key:
            yield (
                f"{key}.urls: got {url} without a key, so that anyone who reaches it can change its weights; start it "
                f"with --api-key, and name a variable with the key by {key}.sglang.api_key_env"
            )


def _ask_one(url: str, settings: ServerLinkConfig, api_key: str) -> Features | str:
    try:
        return probe_server(url, settings, api_key=api_key)
    except (ServerUnavailable, RequestRefused) as error:
        hint = "" if api_key else "; if the server wants a bearer key, name its variable by sglang.api_key_env"
        return f"{url} cannot be used as an SGLang server: {error}{hint}"
    except (StreamError, msgspec.DecodeError) as error:
        return f"{url} does not answer like an SGLang server: {error}"


def _other_tokenizers(
    key: str, urls: tuple[str, ...], settings: ServerLinkConfig, api_key: str, student: Path
) -> list[str]:
    """Servers for which ids of the student stand for other text. Only where `student` is a folder with a tokenizer."""
    if not (student / "tokenizer.json").is_file():
        return []
    mistakes: list[str] = []
    for url in urls:
        try:
            differing = compare_tokenizers(url, settings, student, api_key=api_key)
        except (ServerUnavailable, RequestRefused, msgspec.DecodeError) as error:
            log.warning("%s.urls: the tokenizer of %s cannot be compared with the student's: %s", key, url, error)
            continue
        if differing is None:
            log.warning("%s.urls: %s does not report its tokenizer; the student's is assumed", key, url)
        elif differing:
            first = ", ".join(f"{i} is {ours!r} in {student} and {theirs!r} there" for i, ours, theirs in differing[:3])
            mistakes.append(
                f"{key}.urls: {url} has another tokenizer than {student}: {len(differing)} of the "
                f"compared ids stand for other text, first {first}; expected a server with this tokenizer"
            )
    return mistakes
