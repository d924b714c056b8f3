"""Starts real SGLang servers, also on a machine without a GPU; see README.md in this folder."""
