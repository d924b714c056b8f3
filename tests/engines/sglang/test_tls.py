"""SGLang servers on other machines: by TLS and with a key, or not at all. Real sockets with real certificates, made by
openssl."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from stillhouse.engines.config import ServerConfig, ServerLinkConfig, WorkerSettings
from stillhouse.engines.http.link import RequestRefused, ServerUnavailable, tls_context
from stillhouse.engines.sglang.attached import ask
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.engines.sglang.provider import SERVERS
from stillhouse.sglang_server import servers
from tests.patience import PATIENCE_S

KEY = "the-key-of-this-server"


class Actor(WorkerSettings, frozen=True, kw_only=True):
    sglang: SGLangConfig = msgspec.field(default_factory=SGLangConfig)


def certificate(folder: Path, name: str, valid_for: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """(certificate, key) that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificates")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}")
    files = ("-keyout", str(key), "-out", str(cert), "-addext", f"subjectAltName={valid_for}")
    subprocess.run(["openssl", "req", "-x509", *made, *files], check=True, capture_output=True, timeout=PATIENCE_S)
    return cert, key


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """(port, certificate) of an HTTPS server that wants KEY, as SGLang's does."""
    cert, key = certificate(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"weight_version": "default", "model_path": "m"})

    app = web.Application()
    app.router.add_get("/model_info", answer)
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=context).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield listener.getsockname()[1], cert
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.run_until_complete(runner.cleanup())
    loop.close()


def model_of(url: str, ca_file: Path | str, key: str = KEY) -> str:
    link = SGLangLink(url, ServerLinkConfig(ca_file=str(ca_file), control_timeout_s=PATIENCE_S), api_key=key)
    try:
        return link.run(link.model_info(), timeout_s=PATIENCE_S).model_path
    finally:
        link.close()


def test_only_a_client_that_knows_the_certificate_and_the_key_gets_an_answer(
    server: tuple[int, Path], tmp_path: Path
) -> None:
    port, cert = server
    url = f"https://127.0.0.1:{port}"
    assert model_of(url, cert) == "m"
    with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        model_of(url, certificate(tmp_path, "stranger")[0])
    with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        model_of(url, "")  # the system's authorities do not know it
    with pytest.raises(RequestRefused, match="HTTP 401"):
        model_of(url, cert, key="")
    with pytest.raises(ServerUnavailable):
        model_of(f"http://127.0.0.1:{port}", "")
    with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        model_of(f"https://localhost:{port}", cert)  # valid for the address, not for this name


def test_the_launchers_probe_checks_the_certificate_too(server: tuple[int, Path], tmp_path: Path) -> None:
    port, cert = server

    def answers(certificate: Path | str) -> bool:
        return servers.answers("127.0.0.1", port, KEY, timeout_s=PATIENCE_S, certificate=str(certificate))

    assert answers(cert)
    assert not answers(certificate(tmp_path, "stranger")[0]) and not answers("") and not answers(tmp_path / "none")


def test_servers_on_other_machines_are_refused_without_tls_or_without_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def mistakes(url: str, api_key_env: str = "", ca_file: str = "") -> str:
        link = SGLangConfig(api_key_env=api_key_env, ca_file=ca_file, connect_timeout_s=0.1)
        _, found = ask("actor", "actor", Actor(urls=(url,), sglang=link), "")
        (mistake,) = found
        return mistake

    monkeypatch.setenv("A_KEY", KEY)
    assert "expected https://" in mistakes("http://10.0.0.7:30000", api_key_env="A_KEY")
    assert "expected https://" in mistakes("http://gpu-box:30000")
    assert "without a key" in mistakes("https://10.0.0.7:30000")
    assert "holds no certificates" in mistakes("https://127.0.0.1:9", ca_file=str(tmp_path / "none"))
    for here in ("http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        assert "cannot be used as an SGLang server" in mistakes(here)


def test_the_certificate_of_a_started_server_is_among_its_arguments(tmp_path: Path) -> None:
    for given in (("--ssl-certfile", "c.pem"), ("--ssl-certfile=c.pem",)):
        assert (
            SERVERS.launch(ServerConfig(device="cpu", args=(*given, "--ssl-keyfile", "k.pem"))).certificate == "c.pem"
        )
    assert SERVERS.launch(ServerConfig(device="cpu")).certificate == ""
    with pytest.raises(ValueError, match="holds no certificates"):
        tls_context(str(tmp_path / "none"))
