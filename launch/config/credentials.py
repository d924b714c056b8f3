"""Finds passwords and keys in the URLs of a configuration, which would stand in config.yaml, records, logs and the
files of schedulers, where many can read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, cast
from urllib.parse import parse_qsl

from stillhouse.protocol.printable import USER_AT_HOST

_QUERY: Final = re.compile(r"://[^\s?#]*[?&#]([^\s\"']*)")
_SECRET_NAMES: Final = frozenset(
    [
        *("key", "apikey", "accesskey", "secretkey", "privatekey", "subscriptionkey"),
        *("token", "accesstoken", "authtoken", "sessiontoken", "refreshtoken", "idtoken", "sastoken", "jwt", "bearer"),
        *("secret", "clientsecret", "password", "passwd", "pwd", "pass", "credential", "credentials"),
        *("sig", "signature", "auth", "authorization"),
        *("xamzsignature", "xamzsecuritytoken", "xamzcredential", "xgoogsignature", "xgoogcredential"),
    ]
)
"""Names of parameters that hold secrets, without `-` and `_`, in small letters."""


def urls_with_credentials(plain: object, key: str = "") -> Iterator[str]:
    """One line for each key whose value has a URL with a user's part or a secret parameter. The value is not in it."""
    match plain:
        case Mapping():
            for name, value in cast(Mapping[object, object], plain).items():
                yield from urls_with_credentials(value, f"{key}.{name}" if key else str(name))
        case list() | tuple():
            for i, value in enumerate(cast("list[object]", plain)):
                yield from urls_with_credentials(value, f"{key}[{i}]")
        case str() if "://" in plain and (what := _secret_in(plain)):
            yield (
                f"{key}: got a URL with {what}, which would stand in config.yaml and in logs; "
                "expected one without. Put it into an environment variable and name that by the key that ends in _env "
                "(url_env of mcp and openenv, key_env of judge and api, api_key_env of sglang)"
            )
        case _:
            pass


def _secret_in(text: str) -> str:
    """What is secret in it; empty for nothing. A user's name alone is not, but in HTTP a token may stand there."""
    for scheme, user in USER_AT_HOST.findall(text):
        if ":" in user or scheme.lower().startswith(("http", "ws")):
            return "a user or password"
    for query in _QUERY.findall(text):
        for name, value in parse_qsl(re.sub("[?#]", "&", query)):
            if value and re.sub("[-_.]", "", name.lower()) in _SECRET_NAMES:
                return f"the parameter {name!r}"
    return ""
