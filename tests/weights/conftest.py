"""Fixtures that these tests share with the learner's."""

from tests.learner.conftest import small_tokenizer, write_rows

__all__ = ["small_tokenizer", "write_rows"]
