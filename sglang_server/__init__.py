"""Real SGLang servers on a machine without a GPU: see README.md beside this file."""
