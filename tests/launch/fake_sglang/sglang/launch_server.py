"""Serves GET /model_info to who has the key. Logs its arguments, the key among them, as the real one does."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def run_server(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO)
    logging.info("server_args=%s", vars(args))
    print(f"pid {os.getpid()} gpus {os.environ.get('CUDA_VISIBLE_DEVICES')} port {args.port}", flush=True)
    if args.behave == "crash":
        raise RuntimeError("no such attention backend")
    if args.behave == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.behave == "mute":
        time.sleep(300)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {args.api_key}"
            body = b'{"weight_version": "default"}'
            self.send_response(200 if known and self.path == "/model_info" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
