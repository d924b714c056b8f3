"""Stands in for SGLang where supervision is tested: real processes and sockets, no model; misbehaves on request."""
